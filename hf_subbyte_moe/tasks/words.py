"""RULER's sentences and noise, and the names that needles go by."""

HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n"
)
NEEDLE = " One of the special magic numbers for {key} is: {number}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
ADJECTIVES = ("red", "quick", "lazy", "silent", "golden", "ancient", "hollow", "frozen", "gentle", "hidden", "vivid")
NOUNS = ("fox", "river", "stone", "table", "garden", "window", "lantern", "bridge", "castle", "eagle", "temple")
