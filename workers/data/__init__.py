"""What a model is trained on: text, token files, digits; and the order in which samples are drawn.

Read `batches.py` (what a rank asks for), `order.py` (which sample comes when), then `text.py` (from files to tokens).
Must not import `server` or `zero_engine`; only `batches.py` and `opening.py` import torch.
"""
