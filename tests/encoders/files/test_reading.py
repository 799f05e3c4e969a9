"""Reading checkpoints: plain data of any class is kept, nothing is run, every wrong file gets its own sentence."""

from __future__ import annotations

import argparse
import collections
import copyreg
import os
import pathlib
import pickle
import re
import struct
import sys
import time
import tracemalloc
import types
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sightline.core.errors import InputError
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
    return sentence


# ---------------------------------------------------------------------------------------------------------------
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


def test_a_parameter_is_a_plain_tensor(tmp_path):
    torch.save({"weight": nn.Parameter(torch.ones(2))}, tmp_path / "file.pth")
    weight = read_checkpoint(tmp_path / "file.pth").content["weight"]
    assert type(weight) is torch.Tensor
    assert not weight.requires_grad


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_namespace(tmp_path, how):
    inner = argparse.Namespace(lr=0.5, betas=(0.9, 0.95))
    torch.save({"model": STATE, "args": argparse.Namespace(model="vit", inner=inner, none=None)}, tmp_path / "f", **how)
    found = read_checkpoint(tmp_path / "f")
    assert found.content["args"] == {"model": "vit", "inner": {"lr": 0.5, "betas": (0.9, 0.95)}, "none": None}
    assert type(found.content["args"]) is dict
    assert found.arguments == {"model": "vit", "inner.lr": 0.5, "inner.betas": (0.9, 0.95), "none": None}


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
    assert found.arguments == {"max_accuracy": 0.25, "epoch": 7, "MODEL.TYPE": "vit", "SEED": 0}
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
    assert found["c"] == {"callbacks.checkpoint.ModelCheckpoint": 1}
    assert not {"training", "trainer", "evil", "callbacks"} & sys.modules.keys()


def test_objects_that_copyreg_makes(tmp_path, foreign, monkeypatch):
    node = foreign("yacs.config", "CfgNode", (dict,))
    node.__reduce__ = lambda self: (copyreg._reconstructor, (node, dict, dict(self)), {"__immutable__": True})  # type: ignore[attr-defined]
    assert save({"w": STATE, "cfg": node(a=1)}, tmp_path / "f", monkeypatch).content["cfg"] == {"a": 1}
    torch.save({"w": STATE, "x": Call(copyreg._reconstructor, "eval", object, None)}, tmp_path / "f")  # type: ignore[attr-defined]
    assert "would call copyreg._reconstructor" in refusal(tmp_path / "f")


def test_omegaconf(tmp_path, foreign, monkeypatch):
    leaf = foreign("omegaconf.nodes", "AnyNode")
    tree = foreign("omegaconf.dictconfig", "DictConfig")
    outer, inner, rate = tree(), tree(), leaf()
    rate.__dict__ = {"_parent": inner, "_val": 0.1}
    inner.__dict__ = {"_parent": outer, "_content": {"lr": rate}}
    outer.__dict__ = {"_metadata": {"type": dict}, "_content": {"optimizer": inner}}
    assert save({"w": STATE, "cfg": outer}, tmp_path / "f", monkeypatch).arguments == {"optimizer.lr": 0.1}


def test_paths_as_python_3_13_writes_them(tmp_path):
    torch.save({"w": torch.zeros(1), "path": pathlib.PurePosixPath("/data")}, tmp_path / "here.pth")
    with zipfile.ZipFile(tmp_path / "here.pth") as here, zipfile.ZipFile(tmp_path / "there.pth", "w") as there:
        for name in here.namelist():
            data = re.sub(rb"cpathlib(\._local)?\n", b"cpathlib._local\n", here.read(name))
            assert not name.endswith("data.pkl") or b"cpathlib._local\nPurePosixPath\n" in data
            there.writestr(name, data)
    assert read_checkpoint(tmp_path / "there.pth").content["path"] == "/data"


def test_plain_data_of_python_numpy_and_torch(tmp_path):
    content = {
        "w": torch.zeros(1),
        "paths": [pathlib.PurePosixPath("/data") / "train", pathlib.Path("out")],
        "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("née"), np.complex64(1j), np.float16(2)],
        "order": np.array([1, 256], ">i2"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "default": collections.defaultdict(list, {"a": [1]}),
        "deque": collections.deque([1, 2], maxlen=2),
        "sets": [{1, 2}, frozenset("a")],
        "simple": types.SimpleNamespace(a=1),
        "types": [torch.Size([2, 3]), torch.float16, torch.device("cuda:1"), int, np.float64],
        "bytes": [b"\xff\x00", b""],
        "bits": [True, None, 2**80, float("inf")],
    }
    torch.save(content, tmp_path / "file.pth")
    found = read_checkpoint(tmp_path / "file.pth").content
    assert found["paths"] == ["/data/train", "out"]
    assert found["scalars"] == [0.5, -3, True, "née", 1j, 2.0]
    assert [type(value) for value in found["scalars"]] == [float, int, bool, str, complex, float]
    assert np.array_equal(found["order"], content["order"])
    assert np.array_equal(found["fortran"], content["fortran"])
    assert found["default"] == {"a": [1]}
    assert found["deque"] == [1, 2]
    assert found["sets"] == content["sets"]
    assert found["simple"] == {"a": 1}
    assert found["types"] == [(2, 3), torch.float16, torch.device("cuda:1"), "builtins.int", "numpy.float64"]
    assert found["bytes"][0] == b"\xff\x00"
    assert found["bits"] == content["bits"]


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
    torch.save({"w": torch.zeros(1), "list": tower, "tuple": layers, "args": bomb}, tmp_path / "file.pth")
    found = read_checkpoint(tmp_path / "file.pth")
    assert found.content["list"][0] is found.content["list"][1]
    assert found.content["tuple"][0] is found.content["tuple"][1]
    assert len(found.arguments) <= 10_000


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


# ---------------------------------------------------------------------------------------------------------------
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
    name = "builtins.eval" if how == "python 2" else "posix.system"
    assert f"nothing of it was executed: loading it would call {name}, which could run code" in refusal(path)
    assert not canary.exists()
    if how not in ("python 2", "unfinished"):
        pickle.loads(code)
        assert canary.exists()  # so the trap does work


def zipped(path, *pickles):
    with zipfile.ZipFile(path, "w") as archive:
        for name, code in pickles:
            archive.writestr(name, code)
        archive.writestr("archive/version", "3\n")
    return path


def test_names_that_are_put_together_from_remembered_texts(tmp_path):
    texts = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x8c\x04math\x8c\x03sin"  # the last ones mislead
    code = texts + b"h\x00h\x01\x93\x8c\x04true\x85R."
    assert pickle.loads(code) == 0
    assert "would call posix.system" in refusal(zipped(tmp_path / "f", ("archive/data.pkl", code)))


def test_the_pickle_that_is_judged_is_the_one_that_is_loaded(tmp_path):
    call = b"\x80\x02}X\x01\x00\x00\x00acsubprocess\nPopen\nX\x04\x00\x00\x00true\x85Rs."
    path = zipped(tmp_path / "f", ("archive/x/data.pkl", b"\x80\x02}."), ("archive/data.pkl", call))
    assert "would call subprocess.Popen" in refusal(path)
    path = zipped(tmp_path / "f", ("archive/data.pkl", b"\x80\x02}."), ("archive/x/data.pkl", call))
    assert read_checkpoint(path).content == {}


@pytest.mark.parametrize("last", [False, True], ids=["content", "keys of storages"])
def test_tuples_in_tuples_do_not_overflow_the_stack(tmp_path, last):
    """The hash of a tuple goes down to its end without a limit, and Python would crash."""
    deep = b"\x80\x02})" + b"\x85" * 500_000 + b"K\x01s."
    head = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    old = head + (b"\x80\x02}." if last else b"") + deep
    assert "a key has more than 64 parts" in refusal(tmp_path / "old.pth", old)
    remembered = b"\x80\x02})" + b"\x85q\x010h\x01" * 2000 + b"K\x01s."
    assert "a key has more than 64 parts" in refusal(zipped(tmp_path / "f", ("archive/data.pkl", remembered)))


def doubled(times):
    """A tuple of two of the same tuple, again and again, in eight bytes each time."""
    return b"K\x01K\x02\x86" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(times))


TEXT = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20 + b"q\x010"
COLLIDE = range(2**10, 2**10 + 99)  # all of these multiples have the same hash
HOSTILE = {  # each takes gigabytes or hours in an unpickler that does as it is told
    "bytearray": b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "bytes": b"cbuiltins\nbytes\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "tensor": b"ctorch\nFloatTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "storage": b"ctorch\nFloatStorage\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "key": b"}" + doubled(60) + b"K\x01s",
    "element": b"cbuiltins\nset\n](" + doubled(60) + b"e\x85R",
    "frozen": b"\x8f(" + doubled(60) + b"\x90",
    "repeated": TEXT + b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R0" * 99,
    "number": b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096,
    "colliding": b"}("
    + b"".join(b"\x8a\x0c" + (i * (2**61 - 1)).to_bytes(12, "little") + b"N" for i in COLLIDE)
    + b"u",
}


@pytest.mark.parametrize("kind", list(HOSTILE))
def test_a_file_takes_memory_and_time_in_proportion_to_its_size(tmp_path, kind):
    code = b"\x80\x02}X\x01\x00\x00\x00a" + HOSTILE[kind] + b"s."
    path = zipped(tmp_path / "f", ("archive/data.pkl", code))
    tracemalloc.start()
    try:
        assert "would call torch." in (sentence := refusal(path)) or "is damaged" in sentence
        assert tracemalloc.get_traced_memory()[1] < 60 * path.stat().st_size + 2**20
    finally:
        tracemalloc.stop()


def test_storages_of_old_files_are_not_made_before_they_are_there(tmp_path):
    torch.save({"w": torch.zeros(4)}, tmp_path / "old.pth", **OLD)
    good = (tmp_path / "old.pth").read_bytes()
    assert good.count(b"K\x04N") == 1
    large = good.replace(b"K\x04N", b"\x8a\x05\x00\x00\x00\x00\x02N")
    assert same(read_checkpoint(tmp_path / "old.pth").content, {"w": torch.zeros(4)})
    (tmp_path / "old.pth").write_bytes(large)
    assert same(read_checkpoint(tmp_path / "old.pth").content, {"w": torch.zeros(4)})  # the file itself has four


def test_many_names_take_little_time(tmp_path):
    code = b"\x80\x02](" + b"".join(b"clibrary\nClass%d\n" % i for i in range(20_000)) + b"e."
    path = zipped(tmp_path / "f", ("archive/data.pkl", code))
    assert "holds no state dict (a mapping of names to tensors) but a list" in refusal(path)


def test_a_tensor_is_not_larger_than_its_file(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**9, 10**3)}, tmp_path / "f")
    assert "a tensor is larger than the file" in refusal(tmp_path / "f")
    torch.save({"w": torch.ones(1).expand(3)}, tmp_path / "f")
    assert read_checkpoint(tmp_path / "f").content["w"].tolist() == [1, 1, 1]


def test_tensors_together_are_not_far_larger_than_their_file(tmp_path):
    block = torch.ones(2**20)
    torch.save({f"w{i}": block.view(2**10, 2**10) for i in range(12)}, tmp_path / "f")  # of four bytes each
    assert len(read_checkpoint(tmp_path / "f").content) == 12
    torch.save({f"w{i}": block.view(2**10, 2**10) for i in range(40)}, tmp_path / "f")
    assert "its tensors together are far larger than the file" in refusal(tmp_path / "f")


def test_tensors_without_numbers_of_their_own_are_no_weights(tmp_path):
    torch.save({"meta": torch.empty(3, device="meta"), "sparse": torch.eye(2).to_sparse(), **STATE}, tmp_path / "f")
    assert tensors(read_checkpoint(tmp_path / "f").content).keys() == STATE.keys()


@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.mkdir, "posix.mkdir"),
        (eval, "builtins.eval"),
        (getattr, "builtins.getattr"),
        (__import__, "builtins.__import__"),
        (torch.load, "torch.serialization.load"),
        (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
        (np.load, "numpy.load"),
        (np.ndarray, "numpy.ndarray"),
    ],
)
def test_calls_are_refused(tmp_path, function, name, how):
    torch.save(
        {"model": STATE, "args": argparse.Namespace(deep=[Call(function, str(tmp_path / "x"))])}, tmp_path / "f", **how
    )
    assert f"would call {name}" in refusal(tmp_path / "f")
    assert not (tmp_path / "x").exists()


def test_names_of_a_file_cannot_command_the_terminal(tmp_path):
    sentence = refusal(tmp_path / "f", b"\x80\x02cos\x1b[31m\nsystem\x1b[2J\n)R.")
    assert "\x1b" not in sentence


def test_a_module_pickled_whole(tmp_path):
    class_name = "torch.nn.modules.container.Sequential"
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    for content in (module, {"model": module, "epoch": 3}):
        torch.save(content, tmp_path / "file.pth")
        assert refusal(tmp_path / "file.pth") == (
            f"{str(tmp_path / 'file.pth')!r} holds {class_name} pickled whole, which only its code can load; "
            "save model.state_dict() instead, and give that"
        )
    torch.save({"model": STATE, "ema": module}, tmp_path / "file.pth")  # here the weights are there, too
    assert same(tensors(read_checkpoint(tmp_path / "file.pth").content, "model"), STATE)
    torch.save(module, tmp_path / "file.pth", **OLD)
    assert "save model.state_dict() instead" in refusal(tmp_path / "file.pth")


def test_torchscript(tmp_path):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        for name in ("data.pkl", "code/__torch__.py", "constants.pkl"):
            archive.writestr(f"file/{name}", b"")
    assert "is a TorchScript archive" in refusal(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty, so its download or copy failed"),
        (b"\n <!DOCTYPE html><html><head><title>404 Not Found", "is a web page .* the download failed"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "the download failed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "run `git lfs pull`"),
        (b"not a checkpoint at all", "is not a checkpoint, it begins with 'not a checkpoint at all'"),
        (b"\x00" * 30, r"is not a checkpoint, it begins with '\\x00\\x00"),
        (b"\x1f\x8b\x08" + b"\x00" * 30, "compressed with gzip; unpack it"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        (b"GGUF" + b"\x00" * 30, "of a language model"),
        (b"\x00" * 257 + b"ustar" + b"\x00" * 300, "is a tar archive"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all", "is damaged or was not downloaded completely"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "is damaged or was not downloaded completely"),
        (pickle.dumps({"a": 1}, 2), "is damaged or was not downloaded"),
        (b"PK\x03\x04" + b"\x00" * 60, "its list of contents, at the end, cannot be read"),
    ],
)
def test_other_files(tmp_path, content, reason):
    assert re.search(reason, refusal(tmp_path / "file.pth", content))


@pytest.mark.parametrize("protocol", range(1, 6))  # with 0, PyTorch cannot read its own files
@pytest.mark.parametrize("how", [{}, OLD], ids=["zip", "old"])
def test_every_protocol(tmp_path, protocol, how):
    content = {"model": STATE, "args": argparse.Namespace(lr=0.1), "a": np.arange(3), "set": {1, 2}, "b": b"\xff"}
    torch.save(content, tmp_path / "file.pth", pickle_protocol=protocol, **how)
    found = read_checkpoint(tmp_path / "file.pth")
    assert same(tensors(found.content, "model"), STATE)
    assert found.arguments["lr"] == 0.1
    assert found.content["set"] == {1, 2}
    assert found.content["b"] == b"\xff"
    assert np.array_equal(found.content["a"], np.arange(3))


@pytest.mark.parametrize("protocol", range(1, 6))
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
    assert same(tensors(found.content, "model"), STATE)
    assert found.arguments == {"__author__": "some"}
    (tmp_path / "file.pkl").write_bytes(pickle.dumps({"model": arrays, "call": Call(os.mkdir, "x")}, protocol))
    assert "would call posix.mkdir" in refusal(tmp_path / "file.pkl")


def test_a_module_pickled_plainly_is_not_a_state_dict(tmp_path):
    assert "is damaged" in refusal(tmp_path / "file.pkl", pickle.dumps({"model": nn.GELU()}))


def test_broken_safetensors(tmp_path):
    assert "is damaged or was not downloaded completely" in refusal(tmp_path / "f.safetensors", b"\x00" * 20)
    save_file(STATE, tmp_path / "f.safetensors")
    whole = (tmp_path / "f.safetensors").read_bytes()
    assert "incomplete" in refusal(tmp_path / "f.safetensors", whole[:-8])


def test_other_zip_archives(tmp_path):
    np.savez(tmp_path / "file.npz", a=np.zeros(3))
    assert "torch.save did not write (inside: a.npy)" in refusal(tmp_path / "file.npz")
    torch.save(STATE, tmp_path / "file.pth")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.write(tmp_path / "file.pth", "file.pth")
    assert "unpack it and give the weights file in it" in refusal(tmp_path / "packed.zip")
    with (
        zipfile.ZipFile(tmp_path / "file.pth") as good,
        zipfile.ZipFile(tmp_path / "again.pth", "w", zipfile.ZIP_DEFLATED) as again,
    ):
        for name in good.namelist():
            again.writestr(name, good.read(name))
    assert "torch.save did not write" in refusal(tmp_path / "again.pth")


def test_no_file(tmp_path):
    (tmp_path / "mae_base.pth").touch()
    assert refusal(tmp_path / "mae_bas.pth").endswith("did you mean 'mae_base.pth'?")
    assert "There is no weights file" in refusal(tmp_path / "none" / "x.pth")
    assert "is a folder; give the weights file in it, such as 'mae_base.pth'" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file but a device or pipe" in refusal(tmp_path / "pipe")
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
