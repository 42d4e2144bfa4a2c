"""Callbacks of transformers' Trainer, called from your own loop."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from looplib._core.checks import check
from looplib._core.kinds import check_kind
from looplib._core.ranks import is_first
from looplib.checkpoint import checkpoint_io
from looplib.distributed import reduce
from looplib.evaluation import evaluate
from looplib.grads import wrapper
from looplib.metrics import Mean, Window, compute
from looplib.state import bind
from looplib.steps import make_train_step
from looplib.types import WHOLE, EvalStep, GradFn, Gradients, Metric, Optimizer, Part, Sink, TrainState, TrainStep

_KEY = "trainer_callbacks"  # in state.extra: TrainerState as JSON, as it was at the last save


class TrainerCallbacks:
    """Run callbacks written for transformers' Trainer: a loop, and a train step in it, that call them.

    >>> import looplib as ll, tempfile, torch, transformers
    >>> class Net(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return {"loss": super().forward(x).square().mean()}
    >>> class SaveAtThree(transformers.TrainerCallback):
    ...     def on_step_end(self, args, state, control, **kwargs):
    ...         control.should_save = state.global_step == 3
    ...     def on_save(self, args, state, control, **kwargs):
    ...         print("saved at step", state.global_step)
    >>> model, optimizer = Net(2, 1), ll.optimizer(torch.optim.SGD, lr=0.1)
    >>> loader, folder = ll.make_loader(torch.ones(8, 2), batch_size=2), tempfile.TemporaryDirectory()
    >>> when = {"num_train_epochs": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none"}
    >>> args = transformers.TrainingArguments(folder.name, **when)
    >>> callbacks = ll.contrib.TrainerCallbacks(args, [SaveAtThree()], model, loader)
    >>> train_step = callbacks.make_train_step(ll.make_grad_fn(model, lambda model, x: model(x)["loss"]), optimizer)
    >>> for state, batch in callbacks.loop(ll.init_state(model, optimizer, epoch_length=len(loader))):
    ...     state, metrics = train_step(state, batch)
    saved at step 3
    >>> callbacks.state.step, callbacks.trainer_state.log_history[-1]["epoch"]
    (4, 1.0)
    >>> folder.cleanup()

    The events come in the Trainer's order, with its `TrainerState`, `TrainerControl` and `args`, and what callbacks
    request is done: log, evaluate, save, leave the epoch, stop. The Trainer's `DefaultFlowCallback` requests what `args`
    asks for. Of `args`, this class reads when to log, evaluate, save and stop, which model is the best, how many
    checkpoints to keep and `output_dir`; callbacks see the rest. Model, optimizer and data are what you make them.

    `loop(state)` restores the latest checkpoint if there is one, with the callbacks' own state, and continues. After the
    loop, `callbacks.state` is the state to use: the best one if `args.load_best_model_at_end`, as the model then is.

    What differs from the Trainer:

    - Each event gets the looplib state by name, as `train_state`, and `on_pre_optimizer_step` gets `grads`, a dict;
      `optimizer` and `lr_scheduler` are None, and parameters have no `.grad`.
    - Microbatches belong to one step, so `on_substep_end` is never called. `on_predict` and `on_push_begin` belong to
      other methods of the Trainer.
    - Logged losses are means over samples or tokens, not over steps. There are no rates and no counts of tokens or of
      floating-point operations.
    - Checkpoints are looplib's, in `output_dir/checkpoints`. The best is the best of those saved, and is kept beside the
      `save_total_limit` latest ones.
    - A resumed run always restores callbacks, and `resume_from_checkpoint` is not needed.

    To stop, set `callbacks.control.should_training_stop = True`; after a `break`, `on_train_end` is not called. Compile
    the model rather than the step (`model.compile()`), since callbacks are called within it.

    Attributes:
        state: the state after the last step; after the loop, the state to use.
        trainer_state: the Trainer's `TrainerState`, with `log_history` and `best_metric`.
        control: the Trainer's `TrainerControl`.
        checkpoints: the `CheckpointIO` of the run.

    Args:
        args: the `TrainingArguments`.
        callbacks: a list of callbacks, or of their classes.
        model: the module that is trained.
        loader: a loader of `make_loader` with a length.
        eval_step: from `make_eval_step`, for evaluations. Its metrics get the prefix `eval_`.
        eval_batches: batches to evaluate on, or a dict of them by name.
        processing_class: what callbacks get under this name, such as a tokenizer.
        log: a sink for what is logged, besides the callbacks.

    Raises:
        ValueError: `args` or a callback requests an evaluation without `eval_step` and `eval_batches`; a callback has an
            `on_substep_end` that would not be called; the loader has no length; or the state has a different
            `epoch_length`.
        RuntimeError: the loop's body did not call the train step of `callbacks.make_train_step` exactly once.
    """

    def __init__(
        self,
        args: Any,
        callbacks: list[Any],
        model: nn.Module,
        loader: Any,
        *,
        eval_step: EvalStep | None = None,
        eval_batches: Any = None,
        processing_class: Any = None,
        log: Sink | None = None,
    ) -> None:
        for value, kind in ((model, "model"), (loader, "loader"), *([(eval_step, "eval_step")] if eval_step else [])):
            check_kind(value, "TrainerCallbacks", kind)
        self._hf: Any = importlib.import_module("transformers.trainer_callback")
        self._model, self._loader, self._sink = model, loader, log
        self._eval_step, self._eval_batches = eval_step, eval_batches
        self.args, self.control, self.state = args, self._hf.TrainerControl(), TrainState()
        flow = self._hf.DefaultFlowCallback
        if not any(issubclass(each if isinstance(each, type) else type(each), flow) for each in callbacks):
            callbacks = [flow(), *callbacks]
        self._handler = self._hf.CallbackHandler(callbacks, model, processing_class, None, None)
        self._handler.train_dataloader, self._handler.eval_dataloader = loader, eval_batches
        self._check_substeps()
        if args.eval_strategy.value != "no" or args.eval_on_start:
            self._check_evaluates(f"args have eval_strategy={args.eval_strategy.value!r}")
        best = args.metric_for_best_model
        self._monitor = best and f"eval_{best.removeprefix('eval_')}"
        self.checkpoints = checkpoint_io(
            os.path.join(args.output_dir, "checkpoints"),
            keep_last=args.save_total_limit,
            monitor=self._monitor,
            mode="max" if args.greater_is_better else "min",
            describe={"loader": loader},
        )
        self._window, self._run, self._logged = Window(), Window(), 0
        self._last: dict[str, Metric] = {}
        self.trainer_state = self._trainer_state()
        self._fire("on_init_end", self.state)

    def make_train_step(self, grad_fn: GradFn, optimizer: Optimizer) -> TrainStep:
        """Make a donated train step that calls the events of a step, and logs, evaluates and saves if they request it.

        Args:
            grad_fn: from `make_grad_fn`, with or without wrappers.
            optimizer: from `ll.optimizer`, with or without wrappers.
        """

        @wrapper(grad_fn)
        def watched(state: TrainState, batch: Any, part: Part = WHOLE) -> Gradients:
            gradients = grad_fn(state, batch, part)
            self._fire("on_pre_optimizer_step", state, grads=gradients.grads)
            return gradients

        step = make_train_step(watched, optimizer, donate=True)

        def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Metric]]:
            self._fire("on_step_begin", state)
            number, epoch = state.step, state.epoch + (state.batch + 1) / (state.epoch_length or 1)
            state, metrics = step(state, batch)
            self._fire("on_optimizer_step", state)
            self._window, self._run = self._window.add(metrics), self._run.add(metrics)
            rate = optimizer.hyperparameters(state.opt_state, number).get("lr", math.nan)
            self._last = {"learning_rate": Mean(rate)} | {k: v for k, v in metrics.items() if k == "grad_norm"}
            self.trainer_state.global_step += 1  # skipped updates count, as in the Trainer
            self.trainer_state.epoch = epoch
            self._fire("on_step_end", state)
            self.state = self._do_what_is_asked(state)
            return self.state, metrics

        return train_step

    def loop(self, state: TrainState) -> Iterator[tuple[TrainState, Any]]:
        """Pairs of a state and the batch for its next step, from the latest checkpoint to the end of training.

        Args:
            state: from `init_state(..., epoch_length=len(loader))`.
        """
        self.state = self._begin(state)
        now = self.trainer_state
        while self.state.epoch < now.num_train_epochs:
            self._fire("on_epoch_begin", self.state)
            for batch in self._loader(self.state):
                before = now.global_step
                yield self.state, batch
                if now.global_step != before + 1:
                    raise RuntimeError(
                        f"the loop's body called callbacks' train step {now.global_step - before} times for one batch; "
                        "call what callbacks.make_train_step returned once: state, metrics = train_step(state, batch)"
                    )
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self._fire("on_epoch_end", self.state)
            self.state = self._do_what_is_asked(self.state)
            if self.control.should_training_stop:
                break
        self._end()

    def _begin(self, state: TrainState) -> TrainState:
        args, length = self.args, len(self._loader)
        check(
            state.epoch_length == length,
            f"the state has epoch_length={state.epoch_length}, and the loader {length} batches; write "
            "ll.init_state(..., epoch_length=len(loader))",
        )
        state = bind(self._model, state)
        state = self.checkpoints.restore(state.replace(extra={**(state.extra or {}), _KEY: ""}))
        memory = json.loads(state.extra[_KEY] or "{}")
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * length)
        epochs = -(-steps // length) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
        run = {"max_steps": steps, "num_train_epochs": epochs, "train_batch_size": args.train_batch_size}
        self.trainer_state = self._trainer_state(**memory | run)
        self.trainer_state.compute_steps(args, steps)  # logging_steps=0.1 is a tenth of all
        self._recall(memory.get("stateful_callbacks", {}))
        self._note_best_checkpoint()
        self._logged = self.trainer_state.global_step
        self._fire("on_train_begin", state)
        if args.eval_on_start:
            self._evaluate(state)
        return state

    def _end(self) -> None:
        if len(self._run):
            self._log(self.state, {"train_loss": compute(reduce(self._run.metrics()))["loss"]})
        if self.args.load_best_model_at_end and self.trainer_state.best_model_checkpoint:
            self.state = self.checkpoints.restore(self.state, which="best")
        self._fire("on_train_end", self.state)

    def _fire(self, event: str, state: TrainState, **values: Any) -> None:
        call = getattr(self._handler, event)
        self.control = call(self.args, self.trainer_state, self.control, train_state=state, **values)

    def _do_what_is_asked(self, state: TrainState) -> TrainState:
        now, scores = self.trainer_state, None
        state = self._left_early(state)
        if self.control.should_log and now.global_step > self._logged:
            values = compute(reduce(self._window.metrics())) | compute(self._last)
            self._window, self._logged = Window(), now.global_step
            self._log(state, values)
        if self.control.should_evaluate:
            scores = self._evaluate(state)
            best = self._is_best(scores)
            if self.args.save_strategy.value == "best":
                self.control.should_save = best
        if self.control.should_save:
            self._save(state, scores)
        return self._left_early(state)

    def _left_early(self, state: TrainState) -> TrainState:
        """The state at the start of the next epoch, if a callback has asked to leave this one."""
        if self.control.should_epoch_stop and state.batch:
            return state.replace(epoch=state.epoch + 1, batch=0)
        return state

    def _log(self, state: TrainState, values: Mapping[str, float]) -> dict[str, float]:
        logs = {**values, "epoch": self.trainer_state.epoch}
        self.trainer_state.log_history.append({**logs, "step": self.trainer_state.global_step})
        if self._sink is not None:
            self._sink(state, values)
        self._fire("on_log", state, logs=logs)
        return logs

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        eval_step = self._check_evaluates("a callback has set should_evaluate")
        sets = self._eval_batches if isinstance(self._eval_batches, Mapping) else {"": self._eval_batches}

        def watched(state: TrainState, batch: Any) -> dict[str, Metric]:
            metrics = eval_step(state, batch)
            self._fire("on_prediction_step", state)
            return metrics

        found: dict[str, float] = {}
        for name, batches in sets.items():  # each set has its events, as in the Trainer
            found |= (scores := evaluate(watched, state, batches, f"eval_{name}_" if name else "eval_"))
            self._fire("on_evaluate", state, metrics=self._log(state, scores))
        return found

    def _is_best(self, scores: Mapping[str, float]) -> bool:
        """Note the metric if it is the best so far, and say if it is, by the Trainer's comparison."""
        if self._monitor is None:
            return False
        names = ", ".join(scores)
        check(self._monitor in scores, f"args.metric_for_best_model is {self._monitor!r}; the scores are {names}")
        now, value, sign = self.trainer_state, scores[self._monitor], 1 if self.args.greater_is_better else -1
        if now.best_metric is not None and not sign * value > sign * now.best_metric:
            return False
        now.best_metric = value
        if self.args.save_strategy.value != "no":
            now.best_global_step = now.global_step
        return True

    def _save(self, state: TrainState, scores: Mapping[str, float] | None) -> None:
        now = self.trainer_state
        now.stateful_callbacks = self._trainer_state().stateful_callbacks
        memory = {
            name: value for name, value in asdict(now).items() if not name.startswith("is_")
        }  # the same on all ranks
        self.checkpoints.save(state.replace(extra={**state.extra, _KEY: json.dumps(memory)}), scores)
        self._note_best_checkpoint()
        self._fire("on_save", state)

    def _note_best_checkpoint(self) -> None:
        best = self.checkpoints.best() if self._monitor else None
        self.trainer_state.best_model_checkpoint = None if best is None else str(best.path)

    def _trainer_state(self, **fields: Any) -> Any:
        ranks = {
            "is_world_process_zero": is_first(),
            "is_local_process_zero": os.environ.get("LOCAL_RANK", "0") == "0",
        }
        return self._hf.TrainerState(**{"stateful_callbacks": [*self._stateful(), self.control], **fields, **ranks})

    def _stateful(self) -> list[Any]:
        return [each for each in self._handler.callbacks if isinstance(each, self._hf.ExportableState)]

    def _recall(self, saved: Mapping[str, Any]) -> None:
        """Give the callbacks the attributes that they had at the last save."""
        waiting = {name: list(each) if isinstance(each, list) else [each] for name, each in saved.items()}
        for each in self._stateful():
            if states := waiting.get(type(each).__name__):
                vars(each).update(states.pop(0)["attributes"])

    def _check_substeps(self) -> None:
        for each in self._handler.callbacks:
            overrides = type(each).on_substep_end is not self._hf.TrainerCallback.on_substep_end
            check(
                self.args.gradient_accumulation_steps == 1 or not overrides,
                f"{type(each).__name__} has on_substep_end, which would never be called: a step of looplib takes all "
                "microbatches. Put what it does into the function that accumulate wraps",
            )

    def _check_evaluates(self, reason: str) -> EvalStep:
        found = self._eval_step
        if found is None or self._eval_batches is None:
            raise ValueError(f"{reason}; give TrainerCallbacks(..., eval_step=eval_step, eval_batches=eval_batches)")
        return found
