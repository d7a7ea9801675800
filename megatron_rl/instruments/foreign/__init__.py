"""Logs of other projects as the rows of a metrics.jsonl: `files` reads the formats, `read` has the tables of names."""
