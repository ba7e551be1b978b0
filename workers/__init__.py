"""Processes that train: Ray actors, rank processes, and their contract with the server.

Read `spec/` (what is asked), `contract.py` (what is said), then `rank.py` (one rank's life). Importing this package
imports nothing; it must never import `server`.
"""
