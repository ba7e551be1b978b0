"""The REST API, one router per noun; a route reads its input, calls `server/rows/` and answers a view.

Read `jobs.py`, then `actions.py`. No SQL here, no commit, and nothing of `server.controller` but the frozen values of
`cluster.py` that rows use. `state.py` says how a route reaches the database and the settings.
"""
