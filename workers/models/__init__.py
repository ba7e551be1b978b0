"""Models that a spec can name: gpt, mlp, and the user's own.

Read `gpt.py`, `mlp.py` and `python.py`; `initial.py` gives every parameter its first bits, `workers/shapes.py` says the
same names and shapes without torch. Must not import `server` or `zero_engine`.
"""
