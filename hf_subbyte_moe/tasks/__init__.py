"""lm-eval tasks that need no download: needles in a text of one's own, key-value recall, and perplexity of a text.

``--include_path`` takes this folder; ``hf-subbyte-moe eval`` adds it by itself.
"""

from pathlib import Path


FOLDER = Path(__file__).parent
