"""The reader: attributes of real images, against what they were drawn with, and what mirroring does to them."""

from __future__ import annotations

import numpy as np
import torch

import sightline as sl
from sightline.generation.reader import AttributeReader, attributes_of, mirrored_attributes, read_accuracies
from sightline.images.targets import Targets


class Squares:
    """A red square of 4 pixels on blue, at column 2 + number, row 3."""

    def read(self, indices):
        from sightline.images.sets import Item

        found = []
        for number in indices:
            image = np.zeros((12, 12, 3), np.uint8)
            image[..., 2] = 255
            image[3:7, 2 + number : 6 + number] = (255, 0, 0)
            found.append(Item(image, None))
        return found

    def targets(self, indices):
        found = []
        for number in indices:
            mask = np.zeros((1, 12, 12), bool)
            mask[0, 3:7, 2 + number : 6 + number] = True
            box = np.array([[2 + number, 3, 6 + number, 7]], np.float32)
            found.append(Targets(np.array([0]), box, mask))
        return found


def squares() -> sl.Images:
    ids = np.array([f"s{n}" for n in range(4)])
    return sl.Images("squares", Squares(), ids, np.arange(4) % 2, ("a", "b"), {"train": np.arange(4)})


def test_attributes_are_those_of_the_largest_object() -> None:
    found = attributes_of(squares(), "train", 8)
    np.testing.assert_allclose(found["position"], [[(4 + n) / 12, 5 / 12] for n in range(4)])
    np.testing.assert_allclose(found["size"], np.full((4, 1), 4 / 12))
    np.testing.assert_allclose(found["object"], [[1, 0, 0]] * 4)
    np.testing.assert_allclose(found["background"], [[0, 0, 1]] * 4)
    np.testing.assert_allclose(found["colour"], [[16 / 144, 0, 128 / 144]] * 4)
    arrays = sl.load_images(np.zeros((8, 4, 4, 3), np.uint8), labels=np.arange(8) % 2)
    assert list(attributes_of(arrays, "train", 4)) == ["colour"]


def test_mirroring_moves_objects_and_nothing_else() -> None:
    known = {name: torch.from_numpy(values).float() for name, values in attributes_of(squares(), "train", 8).items()}
    turned = mirrored_attributes(known, torch.tensor([True, False, True, False]))
    torch.testing.assert_close(turned["position"][:, 0], torch.tensor([8 / 12, 5 / 12, 6 / 12, 7 / 12]))
    torch.testing.assert_close(turned["position"][:, 1], known["position"][:, 1])
    assert turned["size"] is known["size"]


def test_a_reader_that_knows_reads_all() -> None:
    known = attributes_of(squares(), "train", 8)
    reader = AttributeReader(known, np.arange(4) % 2, 2)
    pictures = torch.randn(4, 3, 8, 8)

    def read(shown):
        mirrored = torch.arange(8) >= 4
        twice = {name: torch.from_numpy(np.concatenate([values] * 2)).float() for name, values in known.items()}
        values = {name: part.double().numpy() for name, part in mirrored_attributes(twice, mirrored).items()}
        classes = np.eye(2)[np.concatenate([np.arange(4) % 2] * 2)]
        return values | {"class": classes, "orientation": np.eye(2)[mirrored.long().numpy()]}

    shapes = {name: values.shape for name, values in reader.read(torch.cat([pictures, pictures])).items()}
    assert shapes == {name: values.shape for name, values in read(None).items()}
    reader.read = read
    found = read_accuracies(reader, pictures, known, np.arange(4) % 2)
    assert {found[name] for name in ("class", "orientation")} == {1.0}
    assert found["position"] > 1 - 1e-9
