"""Generation on vLLM servers, processes of their own on this machine or on other nodes.

`generator` is what the loop uses; it speaks through `client` to servers that `server` starts; `pool` keeps track of
them, `dispatch` deals requests out. `guard` (in the server) and `client` are the two ends of one protocol, which
docs/servers.md describes. Only `server`, `guard` and `extension` run inside a server.
"""
