// What both kernels for linear layers share: tokens in 16-byte words of 8 values, up to three matrices side by side.

constexpr int PASSES = WIDTH / (256 * WARPS);
constexpr int HALVES = TOKENS > 8 ? 2 : 1;
static_assert(WIDTH % (256 * WARPS) == 0, "passes are whole");

struct Params {
    const uint4 *hidden;  // [T, WIDTH]
    const u8 *weight[3];  // of rows_i rows
    u16 *output;          // [T, rows]
    int ends[3];          // rows of the first matrix, of the first two, of all
    int unused;
};

// The matrix in which a row of all lies, and which of its rows that is.
struct Place {
    const u8 *matrix;
    int row;
};
DEVICE Place place_of(const Params &p, int row) {
    const int part = row < p.ends[0] ? 0 : row < p.ends[1] ? 1 : 2;
    return {p.weight[part], row - (part ? p.ends[part - 1] : 0)};
}

DEVICE uint4 load_weight(const void *from) {
    uint4 word;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from));
    return word;
}
DEVICE uint4 load_state(const uint4 *from, bool there) {
    uint4 word = make_uint4(0, 0, 0, 0);
    if (there)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(from) : "memory");
    return word;
}
