from alambique.core.errors import did_you_mean


def test_the_nearest_name_or_all_of_them() -> None:
    assert did_you_mean("learning_rat", ["seed", "learning_rate"]) == "; did you mean learning_rate?"
    assert did_you_mean("xyz", ["b", "a"]) == "; known: a, b"
    assert did_you_mean("xyz", []) == ""
