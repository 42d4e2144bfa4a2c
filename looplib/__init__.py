"""looplib: functional, composable PyTorch training loops."""

from looplib.gradients import GradFn, Gradients, Part, clip_by_global_norm, global_norm, make_grad_fn
from looplib.loader import Loader, make_loader
from looplib.metrics import Mean, Metric, batch_size, compute, evaluate, merge
from looplib.optimizer import NonFiniteGradientsError, Optimizer, apply_if_finite, optimizer
from looplib.predicates import (
    Predicate,
    after_epochs,
    after_samples,
    after_seconds,
    after_steps,
    at_epoch_end,
    at_step,
    every_n_epochs,
    every_n_samples,
    every_n_steps,
    every_seconds,
    predicate,
)
from looplib.progress import progress
from looplib.schedules import (
    Schedule,
    constant,
    cosine,
    cosine_restarts,
    cyclic,
    exponential,
    inverse_sqrt,
    join,
    linear,
    multistep_decay,
    one_cycle,
    polynomial,
    scaled,
    step_decay,
    warmup,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from looplib.sinks import Sink, console, jsonl, read_jsonl, tee
from looplib.state import DonatedStateError, TrainState, bind, copy_state, end_epoch, init_state
from looplib.steps import EvalStep, TrainStep, make_eval_step, make_predict_step, make_train_step
