"""Everything that reads or writes a table, one file per noun; rows come in and frozen values go out.

Read `jobs.py` first (the guarded transition), then `reports.py` (what ranks say). A function that writes takes a `Tx`
and never commits; one that reads takes a connection. Nothing here imports `server.routes` or `server.controller`.
"""
