"""The controller: load, plan (pure), apply with the fence.

Read `scheduler.py` and `retry.py` (pure decisions), `reconciler.py` (load and apply), `cluster.py` (the seam to Ray).
Only `ray_cluster.py`, `ray_agents.py` and `ray_calls.py` may import ray; nothing here imports `server.routes`.
"""
