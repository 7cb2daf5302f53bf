"""Several GPUs and several processes: what this package does inside accelerate's and Transformers' own engines.

``heads``: KV heads spread over ranks by tensor parallelism. ``experts``: whole clusters of experts on ranks.
``launch``: one rank speaks, and a failure of one is the end of all.
"""
