"""Other LLM servers: each installed in a folder of its own, started, driven by our load, ended.

`python -m bench.peers install [NAME...]` and `python -m bench.peers list`. What is installed lies in
`$NOVAINFER_PEERS`, else in `~/.cache/novainfer/peers`; our own virtual environment is never touched.
"""
