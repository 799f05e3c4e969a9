"""What the words of a study say about its encoders."""

from sightline.cli.study import _roles


def test_encoders_given_by_their_role_know_what_they_were_fine_tuned_from() -> None:
    encoders, roles = _roles({"rec": {"tuned": "zoo:mae_0_tuned", "mae": "zoo:mae_0"}}, ["mae:seed=1"])
    assert list(encoders) == ["tuned", "mae"]
    assert roles["tuned"].tuned_from == "mae"
    assert (roles["mae"].method, roles["mae"].seed) == ("mae", 1)
