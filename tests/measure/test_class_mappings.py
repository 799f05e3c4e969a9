"""Coarse classes from fine ones: the file that comes along, files of users, and the scores."""

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from support.plans import LAYERS, TEST, TRAIN, activations, computed, make_plan

from sightline.analyses import shape_bias
from sightline.core.errors import InputError
from sightline.measure.class_mappings import ClassMapping, load_mapping, mean_probabilities
from sightline.measure.classifiers import HEAD, Classifier, ClassifierChoice, DecisionAnalysis, Where
from sightline.measure.plan import Key


def test_the_16_categories_are_those_of_the_publication() -> None:
    mapping = load_mapping("imagenet16")
    assert mapping.outputs == 1000
    assert {name: len(members) for name, members in mapping.members.items()} == {
        "airplane": 1,
        "bear": 4,
        "bicycle": 2,
        "bird": 49,
        "boat": 5,
        "bottle": 7,
        "car": 3,
        "cat": 6,
        "chair": 4,
        "clock": 3,
        "dog": 109,
        "elephant": 2,
        "keyboard": 2,
        "knife": 1,
        "oven": 1,
        "truck": 8,
    }
    numbers = [int(fine) for members in mapping.members.values() for fine in members]
    assert len(numbers) == len(set(numbers)) == 207
    assert mapping.members["elephant"] == ("385", "386")  # Indian and African


def test_synsets_are_those_of_the_outputs() -> None:
    """timm knows the order of the 1000 classes by itself."""
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    path = Path(shape_bias.__file__).parents[1] / "measure" / "mappings" / "imagenet16.csv"
    rows = [line.split(",") for line in path.read_text().splitlines() if line[0].isdigit()]
    assert len(rows) == 207
    assert all(info.index_to_label_name(int(index)) == synset for index, _, synset in rows)


def test_scores_are_mean_probabilities() -> None:
    random = np.random.default_rng(0)
    outputs = 5 * random.normal(size=(7, 1000))
    members = load_mapping("imagenet16").members_of(["dog", "cat"], None, 1000)
    probabilities = softmax(outputs, 1)
    expected = np.stack([probabilities[:, members[0]].mean(1), probabilities[:, 281:287].mean(1)], 1)
    np.testing.assert_allclose(mean_probabilities(outputs, members), expected, rtol=1e-13)
    # Not the sum, by which many dogs would win against a few cats.
    even = np.zeros((1, 1000))
    even[:, 281:287] = 0.1
    assert mean_probabilities(even, members).argmax() == 1
    head = Classifier(Where(HEAD, "head.0", "gap", "imagenet16"), members=members)
    np.testing.assert_array_equal(head.scores(outputs), mean_probabilities(outputs, members))


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "pets.csv"
    path.write_text("# mine\nfine,coarse,note\ntabby,cat,striped\n2,dog,\npug,dog,\n")
    mapping = load_mapping(str(path))
    assert mapping.members == {"cat": ("tabby",), "dog": ("2", "pug")}
    assert mapping.members_of(["dog", "cat"], ["tabby", "pug", "beagle"], 3) == ((2, 1), (0,))
    before = ClassifierChoice(mapping=str(path))
    path.write_text("fine,coarse\ntabby,cat\npug,dog\n")
    assert ClassifierChoice(mapping=str(path)) != before  # another question, though of the same name


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "There is no mapping of classes .*pets.csv'; give imagenet16, or a CSV file"),
        ("name,class\na,b\n", "needs the columns fine and coarse, not name, class"),
        ("", "needs the columns fine and coarse, not none"),
        ("fine,coarse\n", "has no rows"),
        ("fine,coarse\na,\n", "lacks a fine or a coarse class"),
        ("fine,coarse\na,b\na,c\n", "names the fine class 'a' twice"),
        ("fine,coarse\na,b\na,b\n", "names the fine class 'a' twice"),
    ],
)
def test_wrong_files(text: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "pets.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_mapping(str(path))


@pytest.mark.parametrize(
    ("classes", "known", "outputs", "sentence"),
    [
        (["cat", "bird"], None, 3, "has no class 'bird'"),
        (["cat"], None, 1, "names a class '1' that is not among its 1 output, whose names are not known"),
        (["cat"], ["x"], 1, "names a class '1' that is not among its classes"),
    ],
)
def test_what_does_not_fit(classes: list[str], known: list[str] | None, outputs: int, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ClassMapping("mine", {"cat": ("1",), "dog": ("0",)}).members_of(classes, known, outputs)


SPLITS = {"train": ("plain",), "conflict": ("plain",)}
ANIMALS = ("bear", "cat", "dog")
LAYERS_OF = {"vit": {**LAYERS["vit"], "head.0": (1000,)}, "vit of others": {**LAYERS["vit"], "head.0": (999,)}}
SHAPE = np.arange(TEST) % 3
TEXTURE = (SHAPE + 1) % 3


def test_an_imagenet_classifier_decides_among_the_16(tmp_path: Path) -> None:
    labels = np.concatenate([np.arange(TRAIN) % 3, SHAPE])
    texture = np.concatenate([np.full(TRAIN, -1), TEXTURE])
    plan = make_plan(tmp_path, labels, LAYERS_OF, SPLITS, ANIMALS, texture=texture)
    data = activations(plan)
    outputs = data[Key("vit", "head.0", "plain")]
    outputs[TRAIN:] = 0
    decided = np.where(np.arange(TEST) % 4 == 0, TEXTURE, SHAPE)
    one_of = np.array([295, 284, 207])  # an American black bear, a Siamese cat, a golden retriever
    outputs[np.arange(TRAIN, TRAIN + TEST), one_of[decided]] = 8
    outputs[:, 0] = 20  # a tench is none of the 16, however sure the head is
    found = computed(shape_bias.ShapeBiasAnalysis(shape_bias.ShapeBiasConfig(), plan), plan, data)
    assert found.classifier.values.tolist() == ["own head", "ridge probe"]
    assert found.mapping.values.tolist() == ["imagenet16", ""]
    assert float(found.overall.sel(encoder="vit")) == shape_bias.shape_bias(decided, SHAPE, TEXTURE) == 0.75
    assert float(found.overall_either.sel(encoder="vit")) == 1
    assert "by its own head (imagenet16)" in shape_bias.headlines(found)[0][2]


def test_a_mapping_that_does_not_fit_is_said(tmp_path: Path) -> None:
    class Bare(DecisionAnalysis):
        pass

    plan = make_plan(tmp_path, layers=LAYERS_OF, classes=ANIMALS)
    with pytest.raises(InputError, match="'vit of others' cannot decide by its head: the mapping imagenet16 is for"):
        Bare(ClassifierChoice(mapping="imagenet16"), plan, ("train", "test"), "This", "this")
    sentence = "'vit of others' has a head with 999 outputs, but made has 3 classes, and the mapping imagenet16 is for"
    with pytest.raises(InputError, match=sentence):
        Bare(ClassifierChoice(mapping="auto", classifier="head"), plan, ("train", "test"), "This", "this")
    with pytest.raises(InputError, match="A mapping of classes is for heads, but the classifier is probe"):
        ClassifierChoice(mapping="imagenet16", classifier="probe")
