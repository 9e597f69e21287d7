"""The border of every measurement: each record, with each field, survives JSONL; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.records import (
    PARTS,
    RECORD_VERSION,
    RecordRefused,
    RecordWriter,
    from_json,
    kinds,
    read_jsonl,
    to_json,
    write_jsonl,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's own type, so that a new field is generated without a line here."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=2)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(choice) for choice in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=4), values(args[1]), max_size=3)
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return records(hint)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**70), 2**70), float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8), bool: st.booleans()}
    return plain[hint]


def records(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", kinds().values(), ids=lambda cls: str(cls.KIND))
@settings(max_examples=40)
@given(data=st.data())
def test_every_record_with_every_field_comes_back_as_it_was(cls: type[Any], data: st.DataObject) -> None:
    record = data.draw(records(cls))
    again = from_json(json.loads(json.dumps(to_json(record))))
    assert to_json(again) == to_json(record)
    assert type(again) is cls


@pytest.mark.parametrize("cls", [*kinds().values(), *PARTS], ids=lambda cls: str(cls.KIND))
def test_records_are_frozen_slotted_and_named_by_keyword(cls: type[Any]) -> None:
    assert cls.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(cls))
    assert hasattr(cls, "__slots__")


def end(**changes: Any) -> dict[str, Any]:
    return {"record": "end", "version": RECORD_VERSION, "ended_unix_s": 1.5, "outcome": "finished", "detail": "",
            **changes}


@pytest.mark.parametrize(("line", "said"), [
    (end(version=2), "version is 2"),
    (end(version=None), "version is None"),
    (end(record="turns"), "kind is 'turns'"),
    (end(record=["end"]), "kind is"),
    (end(extra=1), "unknown field 'extra'"),
    ({k: v for k, v in end().items() if k != "detail"}, "lacks the field 'detail'"),
    (end(detail=7), "end.detail is 7"),
    (end(outcome="fine"), "end.outcome is 'fine'"),
    (end(ended_unix_s="1.5"), "end.ended_unix_s"),
    (end(ended_unix_s=True), "end.ended_unix_s"),
])
def test_what_this_version_would_not_have_written_is_refused(line: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordRefused, match=said):
        from_json(line)


def test_a_refusal_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(end()) + "\n" + '{"record": "end", "ver', encoding="utf-8")
    lines = read_jsonl(path)
    assert next(lines) == from_json(end())
    with pytest.raises(RecordRefused, match=r"records\.jsonl, line 2"):
        next(lines)


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(RecordRefused, match="line 1"):
        list(read_jsonl(path))


def test_a_file_of_records_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_jsonl(path, [from_json(end())])
    with pytest.raises(FileExistsError):
        RecordWriter(path)
    assert list(read_jsonl(path)) == [from_json(end())]


def test_each_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "records.jsonl")
    writer.write(from_json(end()))
    assert list(read_jsonl(tmp_path / "records.jsonl")) == [from_json(end())]
    writer.close()
