"""The service: owns the truth about jobs. FastAPI, SQLAlchemy, and the controller.

Read `states.py` (the one table of states), `models/` (the database), `app.py` (the API), then `controller/`.
It must never import torch, and only `ray_cluster.py`, `ray_agents.py` and `ray_calls.py` of the controller import ray.
"""
