"""What quantizing needs to know about each row of a layer: key means, codebooks, centroids, moments of its queries.

A row's key mean and fitted tables come from the tokens that it packs first and are frozen then, because tiles are
immutable and decode with them; the moments of its queries only choose codes and follow the prompt. Rows never share
fitted state, so a row does not depend on its neighbours.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.cache.balance import KeyBalance
from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.cache.prompts import SampledQueries
from hf_subbyte_moe.codecs import Codec, Table
from hf_subbyte_moe.codecs.codebooks import fit_centroids, fit_table, universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from hf_subbyte_moe.codecs.shaping import Shaping, normalized, second_moment
from hf_subbyte_moe.ops import TILE_TOKENS, Order, normalize_tokens, split_outliers
from hf_subbyte_moe.policy import KEYS, VALUES, SideCodec, side_codec
from hf_subbyte_moe.transfers import upload


_MOMENT_QUERIES = 1024  # of a prompt, at most
_MIN_QUERIES = 8  # that tell more than no metric


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _plain(table: Tensor) -> Tensor:
    """``[entries, vector_dim]`` fp32 of a table ``[1, 1, entries, vector_dim]`` that everybody shares."""
    return table[0, 0].float()


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _moment_positions(tokens: int, device: torch.device) -> Tensor:
    """Uploaded once for all layers: not the first ones, which see little."""
    first, count = tokens // 4, min(tokens - tokens // 4, _MOMENT_QUERIES)
    positions = torch.linspace(first, tokens - 1, count, dtype=torch.float32).long()
    return positions.to(device)  # waits: other streams use it too


class RowCodecs:
    """Means, tables and rotations of one layer.

    Attributes:
        mean: ``[B, H, D]`` fp32 key means; zero until a row packs.
        frozen: ``[B]`` rows whose mean and tables tiles depend on.
        balance: factors of the rows' keys.
        rotations: ``[D, D]`` fp32 for keys and for values; constants, shared by all layers of a device.
        signs: ``[D]`` fp32, the signs in them.
        orders: which lanes own the codes of each side; both sides of a latent cache are parts of the key.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        tiers: Sequence[Codec],
        codebook: str,
        key_states: Tensor,
        value_states: Tensor,
        latent: bool,
        metric: Tensor | None = None,
    ) -> None:
        """Make room for the tiers that a policy may choose.

        Args:
            tiers: of the policy.
            codebook: the config's.
            key_states: ``[B, H, any, D]``, for shapes, dtype and device.
            value_states: likewise.
            latent: the first side is a latent.
            metric: ``[H, D, D]`` what errors of keys cost, unrotated, in place of the prompt's queries; or None.
        """
        batch, heads, _, key_dim = key_states.shape
        device = key_states.device
        given = {
            side_codec(codec, side, latent).name: side_codec(codec, side, latent) for side in (0, 1) for codec in tiers
        }
        self._tiers = [codec for codec in given.values() if codec.table is not Table.NONE]
        self._online = codebook == "online"
        # a latent is value and key at once: its queries are not all that its errors cost
        self._by_queries = codebook == "queries" and not latent
        self._moments = torch.zeros(0, dtype=torch.float16)
        self._seen: NDArray[np.int64] = np.zeros(batch, dtype=np.int64)  # queries in each row's moments
        # of groups of rows whose moments did not change since; a row is in one of them
        self._shapings: dict[tuple[int, ...], Shaping] = {}
        if self._by_queries:
            self._moments = torch.zeros(batch, heads, key_dim, key_dim, dtype=torch.float16, device=device)
        self._metric = None if metric is None else upload(metric, device)
        self.orders = (Order.KEYS, Order.KEYS if latent else Order.VALUES)
        self.frozen = np.zeros(batch, dtype=bool)
        self.mean = torch.zeros(batch, heads, key_dim, dtype=torch.float32, device=device)
        self.balance = KeyBalance((batch, heads, key_dim), possible=not latent)
        dims = (key_dim, value_states.shape[-1])
        self.rotations = tuple(rotation_matrix(dim, device) for dim in dims)
        self.signs = tuple(rotation_signs(dim, device) for dim in dims)
        self._tables: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for codec in self._tiers:
            start = universal_table(codec.format, device)
            for side in (KEYS, VALUES):
                table = start
                if codec.table is Table.CENTROIDS:
                    table = start.float().repeat(batch, heads, 1, 1)
                elif self._online:
                    table = start.repeat(batch, 1, 1, 1)
                self._tables[side][codec.tier_id] = table

    def keep_metric_of(self, heads: slice) -> None:
        """Of a metric of all heads, keep that of the heads that are here."""
        if self._metric is not None and len(self._metric) != self.mean.shape[1]:
            self._metric = self._metric[heads].contiguous()

    def tables(self, side: int, rows: slice | Tensor | None = None) -> dict[int, Tensor]:
        """Tier id -> ``[b or 1, H or 1, entries, vector_dim]`` of some rows; without rows, what all of them use."""
        if rows is None:
            return self._tables[side]
        return {tier: table[rows] if table.shape[0] > 1 else table for tier, table in self._tables[side].items()}

    def kind(self, row: int) -> Hashable:
        """Rows of one kind may be quantized together; a codebook of a row's own is only for its own tiles."""
        return bool(self.frozen[row]), int(self._seen[row]), row if self._online else None

    def side(self, side: int, rows: RowGroup) -> SideCodec:
        """How one side of some rows is quantized, their heads as those of one row."""
        tables = {}
        for codec in self._tiers:
            table = self._tables[side][codec.tier_id]
            if codec.table is Table.CENTROIDS:
                tables[codec.tier_id] = table[rows.index].flatten(0, 1)[:, :, 0].float()
            else:
                tables[codec.tier_id] = table[rows.first, 0].float() if self._online else _plain(table)
        mean = self.mean[rows.index].flatten(0, 1) if side == KEYS else None
        shaping = self._shaping(rows) if side == KEYS else None
        return SideCodec(self.rotations[side], mean, tables, self.orders[side], self.signs[side], shaping)

    def _shaping(self, rows: RowGroup) -> Shaping | None:
        """By what the keys of some rows choose their codes; None: by the nearest entry."""
        if self._metric is not None:
            rotation = self.rotations[KEYS]
            metric = self.balance.of_metric(self._metric.float(), rows)
            return Shaping(rotation @ metric @ rotation.t())
        if not self._seen[rows.first]:
            return None
        key = tuple(rows.rows)
        if key not in self._shapings:
            self._forget_shapings(rows.rows)
            self._shapings[key] = Shaping(self._moments[rows.index].flatten(0, 1).clone())
        return self._shapings[key]

    def _forget_shapings(self, rows: Sequence[int]) -> None:
        for key in [key for key in self._shapings if not set(key).isdisjoint(rows)]:
            del self._shapings[key]

    def moment_positions(self, tokens: int) -> Tensor | None:
        """``[M]`` places of the queries, among so many, that :meth:`see_queries` looks at; None where it does not."""
        return _moment_positions(tokens, self.mean.device) if self._by_queries and tokens >= _MIN_QUERIES else None

    def see_queries(self, rows: RowGroup, queries: SampledQueries) -> None:
        """Let some rows' keys know these rows' queries: those of a prompt, or of a piece of it.

        Args:
            rows: which.
            queries: ``probe`` ``[b, HQ, S, D]``, ``moment`` ``[b, HQ, M, D]`` at :meth:`moment_positions`, or None.
        """
        if queries.moment is None:
            return
        query, tokens = queries.moment.float() @ self.rotations[KEYS].t(), queries.tokens
        heads, dim = self.mean.shape[1:]
        moment = second_moment(query.reshape(len(rows) * heads, -1, dim)).unflatten(0, (-1, heads))
        share = tokens / (tokens + int(self._seen[rows.first]))
        self._moments[rows.index] = torch.lerp(self._moments[rows.index].float(), moment, share).to(
            self._moments.dtype
        )
        self._seen[rows.rows] += tokens
        self._forget_shapings(rows.rows)

    def saw_queries(self, rows: RowGroup) -> bool:
        """Whether rows that are alike know queries."""
        return bool(self._seen[rows.first])

    def begin_again(self, rows: RowGroup) -> None:
        """Rows without a tile forget what they were fitted to, and all queries."""
        self.frozen[rows.rows] = False
        self._seen[rows.rows] = 0
        self._forget_shapings(rows.rows)

    def moments(self) -> tuple[Tensor, NDArray[np.int64]] | None:
        """What :meth:`see_again` takes: moments of the queries that were seen, and how many these were."""
        return (self._moments.clone(), self._seen.copy()) if self._by_queries else None

    def see_again(self, before: tuple[Tensor, NDArray[np.int64]] | None) -> None:
        """Know the queries of before."""
        if before is not None:
            self._forget_shapings(np.flatnonzero(self._seen != before[1]).tolist())
            self._moments, self._seen = before

    def fit_balance(self, rows: RowGroup, key: Tensor) -> Tensor | None:
        """Choose factors of rows that have none by their keys ``[b * H, N, D]``.

        Returns:
            ``[b, H, D]`` what to divide keys by that are stored already; None if no row needs factors.
        """
        found = self.balance.fit(rows, key)
        if found is None:
            return None
        factors, changed = found
        for row in changed:
            self._scale_moments(row, factors[rows.rows.index(row)])
        return factors

    def balance_again(self, factors: Tensor | None, stored: Tensor) -> Tensor:
        """Take earlier factors; what the stored keys ``[B, H, N, D]`` are by them."""
        given_up = self.balance.factors
        stored = self.balance.go_back(factors, stored)
        if given_up is not None and given_up is not factors:
            ratio = given_up.reciprocal() if factors is None else factors / given_up
            for row in (ratio != 1).flatten(1).any(1).nonzero().flatten().tolist():
                self._scale_moments(row, ratio[row])
        return stored

    def _scale_moments(self, row: int, factors: Tensor) -> None:
        """Moments of a row's queries before, as if these had been multiplied by ``[H, D]``."""
        if not self._seen[row]:
            return
        rotation = self.rotations[KEYS]
        moment = rotation.t() @ self._moments[row].float() @ rotation
        moment = moment * factors[:, :, None] * factors[:, None, :]
        self._moments[row] = normalized(rotation @ moment @ rotation.t()).to(self._moments.dtype)
        self._forget_shapings([row])

    def fit(self, rows: RowGroup, key: Tensor, value: Tensor, freeze: bool) -> None:
        """Fit means and tables of some rows to their tokens ``[b * H, N, D]``, unless they are frozen."""
        if self.frozen[rows.first]:
            return
        self.frozen[rows.rows] = freeze
        mean = key.mean(1, dtype=torch.float32)
        self.mean[rows.index] = mean.unflatten(0, (len(rows), -1))
        if not self._online and all(codec.table is Table.CODEBOOK for codec in self._tiers):
            return
        centred = (key.float() - mean[:, None], value.float())
        for side in (KEYS, VALUES):
            for codec in self._tiers:
                if codec.table is Table.CENTROIDS:
                    self._fit_centroids(side, rows, codec, centred[side])
                elif self._online:
                    unit, _ = normalize_tokens(centred[side] @ self.rotations[side].t())
                    vectors = unit.float().flatten(0, 1)  # autocast multiplies in another dtype
                    self._tables[side][codec.tier_id][rows.first, 0] = fit_table(vectors, codec.format)

    def _fit_centroids(self, side: int, rows: RowGroup, codec: Codec, states: Tensor) -> None:
        heads, tokens, dim = states.shape
        whole = states[:, : tokens // TILE_TOKENS * TILE_TOKENS]
        if not whole.shape[1]:
            return
        tiles = whole.reshape(-1, TILE_TOKENS, dim)
        _, _, inliers = split_outliers(tiles, codec.format.tile_outliers(dim))
        unit = normalize_tokens(inliers)[0].reshape(heads, -1)  # one tile lies as the caller has it
        fitted = [fit_centroids(unit[head], codec.format) for head in range(heads)]
        table = self._tables[side][codec.tier_id]
        table[rows.index] = torch.stack(fitted).view(len(rows), *table.shape[1:]).to(table.dtype)

    def thaw(self, row: int) -> None:
        """A row lost its last tile: what it packs next may fit anew."""
        self.frozen[row] = False

    @torch.inference_mode(False)
    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows."""
        self.mean = self.mean.index_select(0, rows)
        self.balance.select_rows(rows)
        order = rows.cpu().numpy()
        self.frozen, self._seen = self.frozen[order], self._seen[order]
        self._shapings.clear()
        if self._by_queries:
            self._moments = self._moments.index_select(0, rows)
        for tables in self._tables:
            for codec in self._tiers:
                if codec.table is Table.CENTROIDS or self._online:
                    tables[codec.tier_id] = tables[codec.tier_id].index_select(0, rows)

    def _own_tables(self) -> dict[str, tuple[int, int]]:
        """Name -> side and tier of the tables that rows fitted themselves."""
        own = [codec for codec in self._tiers if codec.table is Table.CENTROIDS or self._online]
        return {f"table.{side}.{codec.name}": (side, codec.tier_id) for side in (KEYS, VALUES) for codec in own}

    def state(self) -> dict[str, Tensor]:
        """Means, factors, the tables that rows fitted, and moments of queries."""
        tables = {name: self._tables[side][tier] for name, (side, tier) in self._own_tables().items()}
        if self._by_queries:
            tables.update({"moments": self._moments, "seen": torch.from_numpy(self._seen)})
        if self.balance.factors is not None:
            tables["factors"] = self.balance.factors
        return {"mean": self.mean, "frozen": torch.from_numpy(self.frozen), **tables}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`state`."""
        self.mean, self.frozen = state["mean"], state["frozen"].cpu().numpy()
        self.balance.factors = state.get("factors")
        for name, (side, tier) in self._own_tables().items():
            self._tables[side][tier] = state[name]
        if self._by_queries:
            self._moments, self._seen = state["moments"], state["seen"].cpu().numpy()
            self._shapings.clear()

    def table_bytes(self) -> int:
        """Bytes of codebooks, centroids, factors and moments of queries; a universal codebook serves both sides."""
        distinct = {table.data_ptr(): table.nbytes for tables in self._tables for table in tables.values()}
        metric = 0 if self._metric is None else self._metric.nbytes
        return sum(distinct.values()) + self._moments.nbytes + metric + self.balance.nbytes()

    def nbytes(self) -> int:
        """Bytes of means and tables."""
        return self.mean.nbytes + self.table_bytes()
