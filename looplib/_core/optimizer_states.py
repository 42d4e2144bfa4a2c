"""Names of the optimizers that created an `opt_state`, judging by its keys, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from looplib._core.mappings import without

_MOMENTS = "step exp_avg exp_avg_sq"

# Keys that each class of torch.optim keeps for a parameter; several sets if they depend on its options.
_KEPT = {
    "SGD": ["", "momentum_buffer"],
    "Adam": [_MOMENTS, f"{_MOMENTS} max_exp_avg_sq"],
    "AdamW": [_MOMENTS, f"{_MOMENTS} max_exp_avg_sq"],
    "RMSprop": [
        f"step square_avg {more}" for more in ("", "momentum_buffer", "grad_avg", "momentum_buffer grad_avg")
    ],
    "Adadelta": ["step square_avg acc_delta"],
    "Adafactor": ["step row_var col_var", "step variance"],  # for matrices, and for vectors
    "Adagrad": ["step sum"],
    "Adamax": ["step exp_avg exp_inf"],
    "ASGD": ["step eta mu ax"],
    "LBFGS": ["func_evals n_iter history t prev_loss d prev_flat_grad H_diag old_dirs old_stps ro"],
    "NAdam": [f"{_MOMENTS} mu_product"],
    "RAdam": [_MOMENTS],
    "Rprop": ["step prev step_size"],
    "Muon": ["momentum_buffer"],
    "SparseAdam": [_MOMENTS],
}
_KEYS = {name: [frozenset(keys.split()) for keys in sets] for name, sets in _KEPT.items()}


def makers_of(keys: frozenset[str]) -> list[str]:
    """The torch.optim classes that keep these keys for a parameter."""
    return [name for name, sets in _KEYS.items() if keys in sets]


def in_words(opt_state: Any) -> str:
    """Name of the optimizer that created an `opt_state`, for a message: `opt_state is ...`.

    >>> in_words({"inner_state": {"state": {"weight": {"step": 0, "sum": 0}}}, "updates": 0})
    'that of Adagrad in a wrapper that keeps updates'
    """
    return f"that of {_maker(opt_state)}" if isinstance(opt_state, Mapping) else f"a {type(opt_state).__name__}"


def _maker(opt_state: Any) -> str:
    if not isinstance(opt_state, Mapping):
        return f"another optimizer, which keeps a {type(opt_state).__name__}"
    if "inner_state" in opt_state:
        return f"{_maker(opt_state['inner_state'])} in a wrapper{_besides(opt_state)}"
    if isinstance(members := opt_state.get("inner_states"), Mapping):
        return f"a partition ({'; '.join(f'{label}: {_maker(member)}' for label, member in members.items())})"
    if not isinstance(entries := opt_state.get("state"), Mapping):
        return f"another optimizer, which keeps {_listed(opt_state)}"
    return _maker_of_entries(entries)


def _besides(opt_state: Mapping[str, Any]) -> str:
    kept = _listed(without(opt_state, {"inner_state"}))
    return f" that keeps {kept}" if kept else ""


def _maker_of_entries(entries: Mapping[str, Any]) -> str:
    keys = next((entry.keys() for entry in entries.values() if isinstance(entry, Mapping) and entry), ())
    return " or ".join(makers_of(frozenset(keys))) or f"another optimizer, which keeps {_listed(keys)}"


def _listed(keys: Any) -> str:
    return ", ".join(map(str, keys))


def kept_in(opt_state: Any) -> dict[str, None]:
    """Entries of a wrapper's `opt_state`, with the labels of a partition; none for a class without wrappers."""
    if not isinstance(opt_state, Mapping) or not {"inner_state", "inner_states"} & opt_state.keys():
        return {}
    members = opt_state.get("inner_states")
    labels = {"inner_states": f"inner_states of {_listed(members)}"} if isinstance(members, Mapping) else {}
    return dict.fromkeys(labels.get(key, str(key)) for key in opt_state)


def wrong_state(opt_state: Any, who: str, more: str = "") -> ValueError:
    """Error for an `opt_state` that an optimizer cannot continue; `more` says what shows it."""
    found = "the state was made without an optimizer" if opt_state is None else f"opt_state is {in_words(opt_state)}"
    return ValueError(
        f"{found}, and {who} is to update it{more}. Make the state with this optimizer, "
        "ll.init_state(model, optimizer), or a new opt_state by optimizer.init(params)"
    )


def name_of(description: Mapping[str, Any], wrapper: str = "") -> str:
    """Name of an optimizer from its description: the class or classes, and the outermost wrapper.

    >>> name_of({"class": "torch.optim.sgd.SGD", "lr": 0.1, "ema": {"wraps": True}})
    'ema around SGD'
    """
    wrappers = [key for key, value in description.items() if isinstance(value, Mapping) and value.get("wraps")]
    outermost = wrapper or (wrappers[-1] if wrappers else "")
    classes = " and ".join(dict.fromkeys(_classes(description)))
    return " around ".join(filter(None, (outermost, classes))) or "this optimizer"


def _classes(description: Mapping[str, Any]) -> list[str]:
    if isinstance(cls := description.get("class"), str):
        return [cls.rpartition(".")[2]]
    return [name for member in description.values() if isinstance(member, Mapping) for name in _classes(member)]
