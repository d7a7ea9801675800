"""Files of rows: what they really are, and row groups of any size."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data import check_source, read_problems
from megatron_rl.errors import InputError

SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@SAME_FOLDER
@given(st.integers(1, 3000), st.integers(1, 1300), st.booleans(), st.sampled_from([1000, 1 << 20]))
def test_row_groups_of_any_size(tmp_path, rows, group, dictionary, page):
    prompts = pa.array([[{"role": "user", "content": f"{i % 7}+1?"}] for i in range(rows)])
    golds = [{"ground_truth": str(i), "style": "rule"} for i in range(rows)]
    table = pa.table({"prompt": prompts, "reward_model": golds})
    layout = {"use_dictionary": dictionary, "dictionary_pagesize_limit": page}
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=max(group, rows // 40), **layout)
    seen = list(read_problems(DataSourceConfig(path=str(tmp_path / "x.parquet"))))
    assert [problem.answer for problem in seen] == [str(i) for i in range(rows)]
    assert seen[-1].question == [{"role": "user", "content": f"{(rows - 1) % 7}+1?"}]


LINE = b'{"problem": "2+2?", "answer": "4"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", gzip.compress(LINE, mtime=0), "it is a gzip file; unpack it: gunzip <"),
        ("x.jsonl", LINE.decode().encode("utf-16"), "it is text in UTF-16; convert it: iconv"),
        ("x.jsonl", LINE.decode().encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("x.jsonl", LINE.decode().encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("x.jsonl", json.dumps([json.loads(LINE)]).encode(), r"it is a JSON array, not one object a line"),
        ("x.jsonl", json.dumps([json.loads(LINE)], indent=1).encode(), r"it is a JSON array, .* jq -c '.\[\]'"),
        ("x.jsonl", b"PAR1\0\0", "it is a parquet file"),
        ("x.jsonl", b"\x28\xb5\x2f\xfd\0", "it is a zstd file"),
        ("x.jsonl", b"\x7fELF\0\1\2\3\0", "it is a binary file"),
        ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        ("x.parquet", LINE, "not a parquet file"),
        ("x.parquet", gzip.compress(LINE, mtime=0), "it is a gzip file"),
        ("x.jsonl.gz", b"", "unknown kind of dataset '.gz'; .*convert it: gunzip "),
        ("x.csv", b"", r"convert it: python -c .*load_dataset\('csv', .*to_parquet\('x.parquet'\)"),
        ("x.json", b"", r"load_dataset\('json'"),
        ("x.arrow", b"", r"load_dataset\('arrow'"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_way_to_convert_it(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        check_source(DataSourceConfig(path=str(tmp_path / name)))


def test_a_folder_of_save_to_disk(tmp_path):
    with pytest.raises(InputError, match="load_from_disk"):
        check_source(DataSourceConfig(path=str(tmp_path)))
