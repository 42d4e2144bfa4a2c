"""Provenance of a run is pickled with its states, and read from pickles that hold less."""

import pickle

from looplib._core.made_with import MadeWith


def test_a_pickle_of_before_models_were_noted_is_read():
    made = MadeWith(optimizer={"lr": 0.1}, restored="a", at_step=3, model={"class": "Linear"})
    assert pickle.loads(pickle.dumps(made)) == made
    older = MadeWith.__new__(MadeWith)
    older.__setstate__([{"lr": 0.1}, (), "a", 3])
    assert older == MadeWith(optimizer={"lr": 0.1}, restored="a", at_step=3)
