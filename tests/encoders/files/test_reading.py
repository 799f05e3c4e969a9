"""Reading checkpoints: weights and plain data are kept, nothing is run, a wrong file gets one sentence."""

import argparse
import collections
import functools
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import time
import traceback
import types
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sightline.core.errors import InputError
from sightline.encoders.files.inspect import describe, inspect
from sightline.encoders.files.reading import printable, read_checkpoint, tensors, without_prefix

STATE = {"norm.weight": torch.arange(6.0), "qkv.weight": torch.arange(12.0).view(3, 4), "index": torch.arange(4)}
OLD = {"_use_new_zipfile_serialization": False}


@pytest.fixture
def foreign(monkeypatch):
    """Makes a class of a module that exists only until the file is written, as yacs where it is not installed."""

    def make(module, name, bases=(), **members):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        made = type(name, bases, {"__module__": module, **members})
        setattr(sys.modules[module], name, made)
        return made

    return make


def save(content, path, monkeypatch, **how):
    """Write the file, then forget the modules of its classes; a stand-in must do without them."""
    torch.save(content, path, **how)
    monkeypatch.undo()
    return read_checkpoint(path)


def same(found, wanted):
    return list(found) == list(wanted) and all(torch.equal(found[name], value) for name, value in wanted.items())


def refusal(path, content=None):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_checkpoint(path)
    sentence = str(error.value)
    assert sentence.isprintable()
    # Torch advises to switch `weights_only` off, which Python would show with the cause.
    assert "weights_only" not in "".join(traceback.format_exception(error.value))
    return sentence


def doubled(times):
    """A tuple of two of the same tuple, again and again, in eight bytes each time."""
    return b"K\x01K\x02\x86" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(times))


def zipped(path, *entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
        if "archive/version" not in archive.namelist():
            archive.writestr("archive/version", "3\n")
    return path


# What can be read


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict, lambda s: {"model": s, "epoch": 3}])
def test_pytorch(tmp_path, how, wrap):
    torch.save(wrap(STATE), tmp_path / "file.pth", **how)
    found = read_checkpoint(tmp_path / "file.pth")
    assert found.container == ("PyTorch (old format)" if how else "PyTorch (zip)")
    assert same(tensors(found.content, *(["model"] if "model" in found.content else [])), STATE)
    assert found.arguments == ({"epoch": 3} if "model" in found.content else {})


def test_safetensors_by_content_and_with_the_texts_of_its_header(tmp_path):
    for name in ("file.safetensors", "file.bin"):
        save_file(STATE, tmp_path / name, metadata={"format": "pt", "recipe": "mae"})
        found = read_checkpoint(tmp_path / name)
        assert found.container == "safetensors"
        assert same(found.content, {name: STATE[name] for name in found.content})
        assert found.content.keys() == STATE.keys()
        assert found.arguments == {"recipe": "mae"}


def test_tensors_are_mapped_not_read(tmp_path):
    torch.save({"model": STATE}, tmp_path / "file.pth")
    save_file(STATE, tmp_path / "file.safetensors")
    zipped = tensors(read_checkpoint(tmp_path / "file.pth").content, "model")
    plain = tensors(read_checkpoint(tmp_path / "file.safetensors").content)
    for state in (zipped, plain):  # all of them lie in the one mapping of the file
        places = [value.untyped_storage().data_ptr() for value in state.values()]
        assert max(places) - min(places) < 4096
    zipped["norm.weight"].add_(1)  # changes a copy of the page, not the file
    assert same(tensors(read_checkpoint(tmp_path / "file.pth").content, "model"), STATE)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_views_of_every_type_bit_by_bit(tmp_path, how, dtype):
    """Tensors that begin inside of their storage, share it, skip or repeat numbers of it."""
    whole = (torch.arange(60) % 7 - 3).to(dtype).view(3, 4, 5)
    views = {
        "whole": whole,
        "row": whole[2],
        "column": whole[:, 1:3, 4],
        "transposed": whole.permute(2, 0, 1),
        "steps": whole.flatten()[7::3],
        "repeated": whole[1, 2, 3].expand(2, 3),
        "channels last": whole[None].contiguous(memory_format=torch.channels_last),
        "scalar": whole[1, 1, 1],
        "empty": whole[3:],
    }
    torch.save({"model": views}, tmp_path / "file.pth", **how)
    found = tensors(read_checkpoint(tmp_path / "file.pth").content, "model")
    assert list(found) == list(views)
    for name, view in views.items():
        assert found[name].dtype == dtype
        assert found[name].stride() == view.stride()
        assert torch.equal(found[name], view)
    assert len({value.untyped_storage().data_ptr() for name, value in found.items() if "last" not in name}) == 1


def test_a_parameter_is_a_plain_tensor(tmp_path):
    weight = nn.Parameter(torch.ones(2))
    weight.numel = "shadows the method"
    torch.save({"weight": weight}, tmp_path / "file.pth")
    weight = read_checkpoint(tmp_path / "file.pth").content["weight"]
    assert weight.numel() == 2
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_namespace(tmp_path, how):
    inner = argparse.Namespace(lr=0.5, betas=(0.9, 0.95))
    torch.save({"model": STATE, "args": argparse.Namespace(model="vit", inner=inner, none=None)}, tmp_path / "f", **how)
    found = read_checkpoint(tmp_path / "f")
    assert found.content["args"] == {"model": "vit", "inner": {"lr": 0.5, "betas": [0.9, 0.95]}, "none": None}
    assert type(found.content["args"]) is dict
    assert found.arguments == {"model": "vit", "inner.lr": 0.5, "inner.betas": [0.9, 0.95], "none": None}


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_yacs_is_read_past_without_yacs(tmp_path, foreign, monkeypatch, how):
    node = foreign("yacs.config", "CfgNode", (dict,))
    config = node(MODEL=node(TYPE="vit", EMPTY=node()), SEED=0)
    config.__dict__ |= {"__immutable__": True, "__deprecated_keys__": set()}
    config["MODEL"]["EMPTY"].__dict__["__immutable__"] = True
    content = {"model": STATE, "config": config, "max_accuracy": np.float64(0.25), "epoch": 7}
    found = save(content, tmp_path / "ckpt.pth", monkeypatch, **how)
    assert found.content["config"] == {"MODEL": {"TYPE": "vit", "EMPTY": {}}, "SEED": 0}
    assert type(found.content["config"]) is dict
    assert found.arguments == {"epoch": 7, "MODEL.TYPE": "vit", "SEED": 0}
    assert same(tensors(found.content, "model"), STATE)
    assert not [name for name in sys.modules if name.startswith("yacs")]


def test_objects_of_any_class_are_their_attributes(tmp_path, foreign, monkeypatch):
    meter = foreign("training.meters", "Meter")()
    meter.average, meter.self = 0.5, meter  # it contains itself
    attribute_dict = foreign("trainer.parsing", "AttributeDict", (dict,))(lr=0.1)
    called = foreign("evil.code", "Never", (), __setstate__=lambda self, state: pytest.fail("it was called"))()
    called.a = 1
    kind = foreign("callbacks.checkpoint", "ModelCheckpoint")
    content = {"state_dict": STATE, "meter": meter, "hyper_parameters": attribute_dict, "x": called, "c": {kind: 1}}
    found = save(content, tmp_path / "file.ckpt", monkeypatch).content
    assert found["meter"]["average"] == 0.5
    assert found["meter"]["self"] is found["meter"]
    assert found["hyper_parameters"] == {"lr": 0.1}
    assert found["x"] == {"a": 1}
    assert found["c"] == {}
    assert not {"training", "trainer", "evil", "callbacks"} & sys.modules.keys()


def test_omegaconf(tmp_path, foreign, monkeypatch):
    leaf = foreign("omegaconf.nodes", "AnyNode")
    tree = foreign("omegaconf.dictconfig", "DictConfig")
    outer, inner, rate = tree(), tree(), leaf()
    rate.__dict__ = {"_parent": inner, "_val": 0.1}
    inner.__dict__ = {"_parent": outer, "_content": {"lr": rate}}
    outer.__dict__ = {"_metadata": {"type": dict}, "_content": {"optimizer": inner}}
    assert save({"w": STATE, "cfg": outer}, tmp_path / "f", monkeypatch).arguments == {"optimizer.lr": 0.1}


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_plain_data_is_kept_and_the_rest_left_out(tmp_path, how):
    content = {
        "w": torch.zeros(1),
        "bits": [True, None, -3, 0.5, "née"],
        "size": torch.Size([2, 3]),
        "default": collections.defaultdict(list, {"a": [1], 3: {}}),
        "ordered": collections.OrderedDict(b=1, a=(2,)),
        "simple": types.SimpleNamespace(a=1),
        "partial": functools.partial(max, 3),
        "numpy": [np.float32(0.5), np.arange(3)],
        "path": pathlib.PurePosixPath("/data"),
        "kind": torch.float16,
        "set": {1},
        "bytes": b"3",
        "long": 2**80,
        ("a", "tuple"): 4,
    }
    torch.save(content, tmp_path / "file.pth", **how)
    found = read_checkpoint(tmp_path / "file.pth")
    plain = {name: found.content[name] for name in ("bits", "size", "default", "ordered", "simple")}
    assert plain == {
        "bits": [True, None, -3, 0.5, "née"],
        "size": [2, 3],
        "default": {"a": [1], 3: {}},
        "ordered": {"b": 1, "a": [2]},
        "simple": {"a": 1},
    }
    assert not {"kind", "set", "bytes", "long"} & found.content.keys()
    assert not found.content["numpy"][0]
    assert found.arguments == {}


def test_a_bomb_of_references_stays_small(tmp_path):
    tower = ["lol"]
    for _ in range(200):
        tower = [tower, tower]
    layers = ("lol",)
    for _ in range(200):
        layers = (layers, layers)
    bomb = {"a": 1}
    for _ in range(60):
        bomb = {"a": bomb, "b": bomb}
    torch.save(
        {"w": torch.zeros(1), "list": tower, "tuple": layers, "args": {"x": tower, **bomb}}, tmp_path / "file.pth"
    )
    found = read_checkpoint(tmp_path / "file.pth")
    assert found.content["list"][0] is found.content["list"][1]
    assert found.content["tuple"][0] is found.content["tuple"][1]
    assert len(found.arguments["x"]) < 1000
    assert len(found.arguments) <= 1000


def text_of(found):
    return sum(len(str(name)) + len(str(value)) for name, value in found.arguments.items())


def test_what_is_long_and_often_pointed_to_is_not_written_out_again_and_again(tmp_path):
    """From files of 1 to 2 MB: names of 8 MB, keys of 120 MB, thousands of times the same list or text."""
    key, loop = "k" * 2**20, {f"a{i}": i for i in range(1100)}
    loop[key] = loop
    torch.save({"w": torch.zeros(1), "args": loop}, tmp_path / "file.pth")
    assert text_of(read_checkpoint(tmp_path / "file.pth")) < 20_000

    text = "t" * 2**21
    keys = {(i, *((text,) * 60)): i for i in range(50)}
    odd = argparse.Namespace(y=1)
    odd.__dict__ = odd.__dict__ | keys
    torch.save(
        {"w": torch.zeros(1), "args": keys, "x": argparse.Namespace(y=keys), "z": odd} | keys, tmp_path / "file.pth"
    )
    found = read_checkpoint(tmp_path / "file.pth")
    assert list(found.content) == ["w", "args", "x", "z"]
    assert (found.content["x"], found.content["z"]) == ({"y": {}}, {"y": 1})

    shared, numbers = [text], list(range(10_000))
    again = {f"s{i}": shared for i in range(300)} | {f"n{i}": numbers for i in range(300)} | {"t": text}
    torch.save({"w": torch.zeros(1), "config": again} | {f"k{i}": text for i in range(300)}, tmp_path / "file.pth")
    assert text_of(read_checkpoint(tmp_path / "file.pth")) < 200_000


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\ndtype\nDOUBLED\x85R",
        b"cnumpy\ndtype\nX\x02\x00\x00\x00f8\x85R(K\x03DOUBLEDNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"cclass\nKept\n)\x81}X\x01\x00\x00\x00aDOUBLEDsb",
    ],
    ids=["code of a number", "order of its bytes", "attribute"],
)
def test_nested_references_are_never_written_out(tmp_path, code):
    """Some 600 bytes in which a tuple of 2^60 ones takes the place of a text."""
    data = b"\x80\x02}X\x04\x00\x00\x00args}X\x01\x00\x00\x00x" + code.replace(b"DOUBLED", doubled(60)) + b"ss."
    found = read_checkpoint(zipped(tmp_path / "f", ("archive/data.pkl", data)))
    assert text_of(found) < 1000
    assert len(describe(inspect(tmp_path / "f"))) < 3000


def test_shared_dicts_without_settings_take_little_time(tmp_path):
    bomb = {}
    for _ in range(10):
        bomb = {f"k{i}": bomb for i in range(10)}
    torch.save({"w": torch.zeros(1), "args": {"lr": 1.5, "bomb": bomb}}, tmp_path / "file.pth")
    started = time.monotonic()
    assert read_checkpoint(tmp_path / "file.pth").arguments == {"lr": 1.5}
    assert time.monotonic() - started < 30  # of 10^9 dicts


def test_settings_that_are_shared_are_under_each_of_their_names(tmp_path):
    shared = {"lr": 1.5}
    torch.save({"w": torch.zeros(1), "args": {"a": shared, "b": {"c": shared}}}, tmp_path / "file.pth")
    assert read_checkpoint(tmp_path / "file.pth").arguments == {"a.lr": 1.5, "b.c.lr": 1.5}


def test_names():
    state = {"encoder.a": torch.zeros(1), "encoder.b": torch.ones(1), "head": torch.ones(2)}
    assert list(without_prefix(state, "encoder.")) == ["a", "b"]
    assert tensors({"x": {"y": {**state, "epoch": 1, 3: torch.ones(1)}}}, "x", "y").keys() == state.keys()
    assert tensors({"x": [1]}, "x", "y") == {} == tensors({}, "x")
    assert printable("a\x1b[2Jb\u202ec" + "d" * 300) == r"a\x1b[2Jb\u202ec" + "d" * 192 + "…"


# What is refused


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.how = function, arguments

    def __reduce__(self):
        return self.how


def handmade(canary):
    """Pickles that make a folder, each by another instruction, as they would stand in data.pkl."""
    command = f"mkdir {canary}"
    text = struct.pack("<I", len(command)) + command.encode()
    short = bytes([len(command)]) + command.encode()
    return {
        "REDUCE": b"\x80\x02cposix\nsystem\nX" + text + b"\x85R.",
        "text": f"cposix\nsystem\n(S'{command}'\ntR.".encode(),
        "INST": f"(S'{command}'\niposix\nsystem\n.".encode(),
        "OBJ": b"\x80\x02(cposix\nsystem\nX" + text + b"o.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c" + short + b"\x85R.",
        "python 2": b"\x80\x02c__builtin__\neval\nX" + text + b"\x85R.",
        "nested": b"\x80\x02}X\x04\x00\x00\x00args](cposix\nsystem\nX" + text + b"\x85Res.",
        "unfinished": b"\x80\x02cposix\nsystem\nX" + text + b"\x85R",
    }


@pytest.mark.parametrize("kind", ["zip", "old", "bare"])
@pytest.mark.parametrize("how", list(handmade("")))
def test_handmade_pickles_are_not_run(tmp_path, how, kind):
    canary = tmp_path / "hacked"
    code, path = handmade(canary)[how], tmp_path / "file.pth"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", code)
            archive.writestr("archive/version", "3\n")
    elif kind == "old":
        torch.save(STATE, tmp_path / "good", **OLD)
        head = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
        assert (tmp_path / "good").read_bytes().startswith(head[:20])
        path.write_bytes(head + code)
    else:
        path.write_bytes(code)
    if (how, kind) == ("python 2", "zip"):  # what it would have called makes a dict
        assert read_checkpoint(path).content == {}
    else:
        sentence = refusal(path)
        told = "is refused, nothing of it was executed: it asks for posix.system, which weights do not need"
        assert told in sentence or how in ("text", "INST", "STACK_GLOBAL", "python 2")
    assert not canary.exists()
    if how not in ("python 2", "unfinished"):
        pickle.loads(code)
        assert canary.exists()  # so the trap does work


@pytest.mark.parametrize("count", [100, 101])
def test_classes_are_never_looked_for(tmp_path, count):
    code = b"".join(b"X\x03\x00\x00\x00%03dclibrary\nClass%d\n)\x81" % (i, i) for i in range(count))
    path = zipped(tmp_path / "f", ("archive/data.pkl", b"\x80\x02}(" + code + b"u."))
    if count == 100:
        assert list(read_checkpoint(path).content.values()) == [{}] * 100
    else:
        assert "it asks for library.Class100, which weights do not need" in refusal(path)


@pytest.mark.parametrize("told", ["argparse.Namespace", "builtins.eval", "eval"])
def test_words_of_torch(tmp_path, monkeypatch, told):
    """Newer versions name functions of Python without their module."""
    known = torch.serialization.get_safe_globals()
    torch.save(STATE, tmp_path / "f")

    def load(*_, **__):
        (*names,) = (item[1] for item in torch.serialization.get_safe_globals() if isinstance(item, tuple))
        if names:
            assert names == ["builtins.eval" if "eval" in told else told]
            return STATE
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {told} was not an allowed global by default. Please")

    monkeypatch.setattr(torch, "load", load)
    assert same(read_checkpoint(tmp_path / "f").content, STATE)
    assert set(torch.serialization.get_safe_globals()) == set(known)


def test_a_tensor_is_not_larger_than_its_file(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**9, 10**3)}, tmp_path / "f")
    assert "its tensors are far larger than the file" in refusal(tmp_path / "f")
    torch.save({"w": torch.ones(1).expand(3)}, tmp_path / "f")
    assert read_checkpoint(tmp_path / "f").content["w"].tolist() == [1, 1, 1]


def test_tensors_together_are_not_far_larger_than_their_file(tmp_path):
    block = torch.ones(2**20)
    torch.save({f"w{i}": block.view(2**10, 2**10) for i in range(12)}, tmp_path / "f")  # of four bytes each
    assert len(read_checkpoint(tmp_path / "f").content) == 12
    torch.save({f"w{i}": block.view(2**10, 2**10) for i in range(40)}, tmp_path / "f")
    assert "its tensors are far larger than the file" in refusal(tmp_path / "f")


def test_tensors_without_numbers_of_their_own_are_no_weights(tmp_path):
    torch.save({"meta": torch.empty(3, device="meta"), "sparse": torch.eye(2).to_sparse(), **STATE}, tmp_path / "f")
    assert tensors(read_checkpoint(tmp_path / "f").content).keys() == STATE.keys()


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
@pytest.mark.parametrize(
    "function",
    [eval, getattr, __import__, subprocess.call, torch.load, torch.storage._load_from_bytes, np.load, np.memmap],
)
def test_calls_are_not_made(tmp_path, function, how):
    """What would be called becomes a dict, and the weights beside it are read; names of `os` are refused."""
    called = Call(function, str(tmp_path / "x"))
    torch.save({"model": STATE, "args": argparse.Namespace(deep=[called], lr=0.1)}, tmp_path / "f", **how)
    found = read_checkpoint(tmp_path / "f")
    assert found.content["args"] == {"deep": [{}], "lr": 0.1}
    assert same(tensors(found.content, "model"), STATE)
    torch.save({"model": STATE, "args": [Call(os.mkdir, str(tmp_path / "x"))]}, tmp_path / "f", **how)
    assert "it asks for posix.mkdir, which weights do not need" in refusal(tmp_path / "f")
    assert not (tmp_path / "x").exists()


def test_names_of_a_file_cannot_command_the_terminal(tmp_path):
    sentence = refusal(tmp_path / "f", b"\x80\x02cos\x1b[31m\nsystem\x1b[2J\n)R.")
    assert "\x1b" not in sentence


def test_a_module_pickled_whole(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    for content in (module, {"model": module, "epoch": 3}):
        torch.save(content, tmp_path / "file.pth")
        assert refusal(tmp_path / "file.pth") == (
            f"{str(tmp_path / 'file.pth')!r} holds a module pickled whole, which only its code can load; "
            "save model.state_dict() instead, and give that"
        )
    torch.save({"model": STATE, "ema": module}, tmp_path / "file.pth")  # here the weights are there, too
    assert same(tensors(read_checkpoint(tmp_path / "file.pth").content, "model"), STATE)
    torch.save(module, tmp_path / "file.pth", **OLD)
    assert re.search(UNREADABLE, refusal(tmp_path / "file.pth"))


UNREADABLE = r"cannot be read( \(.*\))?: it is damaged, incomplete or more than a state dict"


def test_torchscript(tmp_path):
    names = ("data.pkl", "code/__torch__.py", "constants.pkl", "version")
    assert re.search(
        UNREADABLE, refusal(zipped(tmp_path / "file.pt", *((f"archive/{name}", b"3\n") for name in names)))
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a checkpoint, it is empty; get it again"),
        (b"\n <!DOCTYPE html><html><head><title>404 Not", r"is not a checkpoint, it begins with '\\n <!DOCTYPE html>"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it begins with 'version https://git-lfs.'"),
        (b"not a checkpoint at all", "is not a checkpoint, it begins with 'not a checkpoint at all'"),
        (b"\x00" * 30, r"is not a checkpoint, it begins with '\\x00\\x00"),
        (b"\x1f\x8b\x08" + b"\x00" * 30, r"is not a checkpoint, it begins with '\\x1f\\x8b"),
        (b"\x00" * 257 + b"ustar" + b"\x00" * 300, "is not a checkpoint"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all", UNREADABLE),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", UNREADABLE),
        (b"\x80\x02}q\x00X\x05", UNREADABLE),
        (b"PK\x03\x04" + b"\x00" * 60, UNREADABLE),
    ],
)
def test_other_files(tmp_path, content, reason):
    assert re.search(reason, refusal(tmp_path / "file.pth", content))


@pytest.mark.parametrize("protocol", range(1, 6))  # torch's own is 2
@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_every_protocol(tmp_path, protocol, how):
    content = {"model": STATE, "args": argparse.Namespace(lr=0.1), "a": np.arange(3), "b": b"\xff"}
    torch.save(content, tmp_path / "file.pth", pickle_protocol=protocol, **how)
    if protocol != 2:
        assert re.search(f"{UNREADABLE}|is not a checkpoint", refusal(tmp_path / "file.pth"))
    else:
        found = read_checkpoint(tmp_path / "file.pth")
        assert same(tensors(found.content, "model"), STATE)
        assert found.arguments == {"lr": 0.1}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_plain_pickle_of_arrays(tmp_path, protocol):
    """As detectron2 writes its models; whatever the order of bytes and of axes."""
    arrays = {
        "norm.weight": np.arange(6, dtype="<f4"),
        "qkv.weight": np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)),
        "index": np.arange(4),
    }
    content = {"model": arrays, "__author__": "some"}
    (tmp_path / "file.pkl").write_bytes(pickle.dumps(content, protocol))
    found = read_checkpoint(tmp_path / "file.pkl")
    assert found.container == "pickle of arrays"
    assert same(tensors(found.content, "model"), STATE)
    assert found.arguments == {"__author__": "some"}
    for function, name in ((os.mkdir, "posix.mkdir"), (eval, "builtins.eval"), (np.load, "numpy.load")):
        called = {"model": arrays, "call": Call(function, str(tmp_path / "x"))}
        (tmp_path / "file.pkl").write_bytes(pickle.dumps(called, protocol, fix_imports=False))
        assert f"is refused, nothing of it was executed: it asks for {name}, which" in refusal(tmp_path / "file.pkl")
    assert not (tmp_path / "x").exists()
    assert "it asks for torch.nn." in refusal(tmp_path / "file.pkl", pickle.dumps({"model": nn.GELU()}, protocol))


def test_an_array_whose_numbers_repeat_is_not_written_out(tmp_path):
    """A few bytes that name an array of 8 TB, whose strides are all zero."""
    called = Call(np.ndarray, (2**40,), np.dtype("f8"), b"\0" * 8, 0, (0,))
    assert "its tensors are far larger" in refusal(tmp_path / "file.pkl", pickle.dumps({"model": {"w": called}}))


def test_broken_safetensors(tmp_path):
    assert re.search(UNREADABLE, refusal(tmp_path / "f.safetensors", b"\x00" * 20))
    save_file(STATE, tmp_path / "f.safetensors")
    whole = (tmp_path / "f.safetensors").read_bytes()
    assert "incomplete metadata" in refusal(tmp_path / "f.safetensors", whole[:-8])


def test_other_zip_archives(tmp_path):
    np.savez(tmp_path / "file.npz", a=np.zeros(3))
    assert re.search(UNREADABLE, refusal(tmp_path / "file.npz"))
    torch.save(STATE, tmp_path / "file.pth")
    with (
        zipfile.ZipFile(tmp_path / "file.pth") as good,
        zipfile.ZipFile(tmp_path / "again.pth", "w", zipfile.ZIP_DEFLATED) as again,
    ):
        for name in good.namelist():
            again.writestr(name, good.read(name))
    assert "its entries are compressed" in refusal(tmp_path / "again.pth")


def test_no_file(tmp_path):
    (tmp_path / "mae_base.pth").touch()
    assert refusal(tmp_path / "mae_bas.pth").endswith("did you mean 'mae_base.pth'?")
    assert "There is no weights file" in refusal(tmp_path / "none" / "x.pth")
    assert refusal(tmp_path).endswith("is a folder; choose from mae_base.pth")
    os.mkfifo(tmp_path / "pipe")
    assert "is a device or pipe; choose from mae_base.pth" in refusal(tmp_path / "pipe")
    assert "There is no weights file" in refusal(tmp_path / "a\0b")
    assert "Cannot read weights" in refusal(tmp_path / ("a" * 5000))


def test_what_is_no_mapping(tmp_path):
    torch.save([torch.zeros(3)], tmp_path / "file.pth")
    assert refusal(tmp_path / "file.pth").endswith("holds no state dict (a mapping of names to tensors) but a list")


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_damage_is_an_input_error_or_harmless(tmp_path, kind):
    path = tmp_path / "file.pth"
    if kind == "safetensors":
        save_file(STATE, path)
    else:
        content = {"model": STATE, "args": argparse.Namespace(lr=0.1), "best": np.float64(1), "a": np.arange(3)}
        torch.save(content, path, **(OLD if kind == "old" else {}))
    good = path.read_bytes()
    random = np.random.default_rng(0)
    sentences = []
    for trial in range(400):
        damaged = bytearray(good)
        if trial % 4 == 0:
            del damaged[random.integers(len(good)) :]
        for place in random.integers(min(len(good), 1500), size=trial % 5):
            damaged[place % max(len(damaged), 1) : place % max(len(damaged), 1) + 1] = random.bytes(1)
        path.write_bytes(damaged)
        try:
            found = read_checkpoint(path)
        except InputError as error:
            sentences.append(str(error))
        else:
            for value in tensors(found.content, *(["model"] if "model" in found.content else [])).values():
                value.float().sum()  # what is read lies within the file
    assert 80 < len(sentences) < 400
    assert all(sentence.isprintable() for sentence in sentences)
