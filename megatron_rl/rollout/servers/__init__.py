"""Generation on vLLM servers, processes of their own on this machine or on other nodes.

The loop uses `generator`, which speaks through `client` to servers that `server` starts. `pool` keeps track of them,
`dispatch` hands requests out. `guard` (in the server) and `client` are the two ends of one protocol, which
docs/servers.md describes. Only `server` and `guard` run inside a server.
"""
