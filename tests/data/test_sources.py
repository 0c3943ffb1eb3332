"""Rows out of every kind of file, with the place each came from."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accord.data import files, sources
from accord.data.sources import fingerprint, read_rows
from accord.errors import DataError

ROWS = [
    {"prompt": "你好 🎉", "completion": 'say "hi",\nthen stop'},
    {"prompt": "two", "completion": "second"},
    {"prompt": "three", "completion": "x"},
]


def values(path: Any, **options: Any) -> list[Any]:
    rows = list(read_rows(path, **options))
    assert all(row.error is None for row in rows), rows
    return [row.value for row in rows]


def write(path: Path) -> Path:
    """ROWS in the kind of file that the name says."""
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".json"):
        data = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
    elif name.endswith(".jsonl"):
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    elif name.endswith((".csv", ".tsv")):
        text = io.StringIO()
        writer = csv.DictWriter(text, ROWS[0].keys(), delimiter="\t" if name.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(ROWS)
        data = text.getvalue().encode()
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        table = pa.Table.from_pylist(ROWS)
        if name.endswith(".parquet"):
            pq.write_table(table, buffer)
        else:
            with (pa.ipc.new_stream if "stream" in name else pa.ipc.new_file)(buffer, table.schema) as out:
                out.write_table(table)
        data = buffer.getvalue()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pytest.importorskip("zstandard").compress(data)
    path.write_bytes(data)
    return path


KINDS = ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", [kind + packed for kind in KINDS for packed in ("", ".gz", ".zst")])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    assert values(write(tmp_path / name)) == ROWS


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert values(path) == ROWS


def test_a_folder_is_all_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv.gz", "notes.md", "deeper/c.parquet", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name) if name != "notes.md" else (tmp_path / name).write_text("no data")
    rows = list(read_rows(tmp_path))
    assert [row.value for row in rows] == ROWS * 3
    assert [row.origin for row in rows[::3]] == ["a.csv.gz:2", "b.jsonl:1", "deeper/c.parquet:1"]


def test_a_datasets_folder_and_its_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    assert values(tmp_path / "one") == ROWS
    assert values(tmp_path / "two") == ROWS
    assert values(tmp_path / "two", split="test") == ROWS[:1]
    assert values(tmp_path / "two", default_splits=sources.VALID_SPLITS) == ROWS[:1]
    with pytest.raises(DataError, match=r"no split dev.*It has: train, test"):
        values(tmp_path / "two", split="dev")


def test_rows_in_memory(tmp_path: Path) -> None:
    import datasets

    assert [row.origin for row in read_rows(ROWS, name="train_dataset")] == [
        "train_dataset[0]",
        "train_dataset[1]",
        "train_dataset[2]",
    ]
    assert values(datasets.Dataset.from_list(ROWS)) == ROWS
    assert fingerprint(ROWS) is None and fingerprint(datasets.Dataset.from_list(ROWS))


def test_standard_input_is_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    sources._standard_input.cache_clear()
    assert fingerprint("-")
    rows = list(read_rows("-"))
    assert [row.value for row in rows] == ROWS and rows[1].origin == "<stdin>:2"
    sources._standard_input.cache_clear()


def test_text_files_are_one_document_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n 你好\nlast", encoding="utf-8")
    rows = list(read_rows(tmp_path / "a.txt"))
    assert [(row.value, row.origin) for row in rows] == [
        ({"text": "one"}, "a.txt:1"),
        ({"text": " 你好"}, "a.txt:3"),
        ({"text": "last"}, "a.txt:4"),
    ]


def test_origins_are_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.origin for row in read_rows(tmp_path / "a.jsonl")] == ["a.jsonl:1", "a.jsonl:3"]
    (tmp_path / "a.json").write_text('[\n  {"a": 1},\n\n  {"a":\n 2}, {"a": 3}]\n')
    assert [row.origin for row in read_rows(tmp_path / "a.json")] == ["a.json:2", "a.json:4", "a.json:5"]
    (tmp_path / "a.csv").write_text('a,b\n1,"two\nlines"\n3,4\n')
    assert [row.origin for row in read_rows(tmp_path / "a.csv")] == ["a.csv:2", "a.csv:4"]


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    rows = list(read_rows(tmp_path / "a.json"))
    assert [row.value for row in rows] == ROWS and rows[0].origin == "a.json:2"
    (tmp_path / "b.json").write_text(json.dumps(ROWS[0], indent=2))
    assert values(tmp_path / "b.json") == ROWS[:1]


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(json_values, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    chunk=st.integers(1, 40),
    ascii_only=st.booleans(),
)
def test_an_array_read_in_pieces_is_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list, indent: Any, chunk: int, ascii_only: bool
) -> None:
    monkeypatch.setattr(files, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), encoding="utf-8", errors="surrogatepass")
    assert values(path) == rows


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    row = json.dumps({"prompt": "x" * 1000, "completion": "y" * 1000})
    for name, text in (("a.jsonl", f"{row}\n" * 10_000), ("a.json", "[" + ",\n".join([row] * 10_000) + "]")):
        (tmp_path / name).write_text(text)  # 20 MB
        tracemalloc.start()
        assert sum(1 for _ in read_rows(tmp_path / name)) == 10_000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8e6, name


# --- what is refused, with file and line ---


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder. Did you mean .*pairs\.jsonl"):
        values(tmp_path / "pair.jsonl")
    with pytest.raises(DataError, match="Nor is there a folder"):
        values(tmp_path / "nowhere" / "a.jsonl")


def test_an_unknown_kind_of_file_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(DataError, match=r"unknown kind of file.*\.jsonl.*\.parquet"):
        values(tmp_path / "a.docx")


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no data file"):
        values(tmp_path)


def test_a_name_that_is_nothing_says_what_was_tried() -> None:
    with pytest.raises(DataError, match="no such file or folder, and as a hub data set"):
        values("nobody/no-such-data-set")


def test_a_line_that_is_not_json_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": }\n{"a": 3}\n')
    good, bad, last = read_rows(tmp_path / "a.jsonl")
    assert (good.value, last.value) == ({"a": 1}, {"a": 3})
    assert bad.origin == "a.jsonl:2" and bad.error is not None and "not JSON: Expecting value at column 7" in bad.error


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"a": 1},\n {"a": }]', "a.json:2 .*Expecting value"),
        ('[{"a": 1}\n {"a": 2}]', "a.json:2 .*expected ',' or ']'"),
        ('[{"a": 1},\n', "a.json:1 .*Expecting value"),
        ('[{"a": 1}', "a.json:1 .*the file ends"),
        ('[{"a": 1},\n]', "a.json:2 .*comma before"),
        ('[{"a": 1}]\n\nmore', "a.json:3 .*something follows"),
        ("nonsense", "a.json:1 .*not JSON"),
        ('[{"a": "open}]', "a.json:1 .*Unterminated"),
    ],
)
def test_a_broken_array_is_named_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=where):
        list(read_rows(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [("9" * 5000, "a number has too many digits"), ("[" * 100_000, "nested too deeply")],
    ids=["digits", "deep"],
)
def test_json_beyond_what_python_reads_is_named(tmp_path: Path, value: str, reason: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{{"a": {value}}}\n')
    _, bad = read_rows(tmp_path / "a.jsonl")
    assert bad.origin == "a.jsonl:2" and bad.error == f"is not usable JSON: {reason}"
    for name, text in (("array.json", f'[{{"a": 1}},\n{{"a": {value}}}]'), ("object.json", f'\n{{\n"a": {value}}}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=rf"{name}:2  is not usable JSON: {reason}"):
            list(read_rows(tmp_path / name))


def test_damaged_text_in_an_arrow_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow")
    path.write_bytes(path.read_bytes().replace(b"second", b"\xffecond"))
    with pytest.raises(DataError, match=r"a\.arrow: is not a \.arrow file that can be read"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("encoding", "guess"),
    [("gb18030", "GB18030"), ("cp1252", "WINDOWS-1252"), ("utf-16", "UTF-16")],
    ids=["gb18030", "cp1252", "utf-16"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_wrong_encoding_is_named_with_its_line(tmp_path: Path, name: str, encoding: str, guess: str) -> None:
    content = "今天天气很好,谢谢你" if encoding != "cp1252" else "naïve café"
    text = {
        "a.jsonl": '{"text": "x"}\n{"text": "%s"}\n',
        "a.json": '[{"text": "x"},\n{"text": "%s"}]',
        "a.csv": "text\n%s\n",
        "a.txt": "x\n%s\n",
    }[name]
    (tmp_path / name).write_bytes((text % content).encode(encoding))
    with pytest.raises(DataError, match=rf"{name}:[12]  is not UTF-8 .*{guess}.*iconv"):
        list(read_rows(tmp_path / name))


def test_a_csv_row_with_too_many_fields_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n")
    _, bad = read_rows(tmp_path / "a.csv")
    assert bad.origin == "a.csv:3" and bad.error == "has 3 fields, the header has 2: a, b"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=name):
        list(read_rows(path))


def test_zstandard_frames_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(json.dumps(row).encode() + b"\n") for row in ROWS))
    assert values(tmp_path / "a.jsonl.zst") == ROWS


def test_a_mapping_is_no_list_of_rows() -> None:
    with pytest.raises(DataError, match="expected a list of rows"):
        list(read_rows({"prompt": ["a"]}))


def test_rows_that_can_be_read_only_once_are_refused() -> None:
    with pytest.raises(DataError, match="Make it a list"):
        list(read_rows(iter(ROWS)))
