"""The documentation site: it builds, its links lead somewhere, and each room and public name has an entry."""

import html
import importlib
import inspect
import json
import posixpath
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import unquote

import matplotlib.image
import pytest
from documentation.site import build
from documentation.trainers import LIBRARIES, anchor
from public import ROOMS, ROOT, public_names
from shared import made_once


class Reader(HTMLParser):
    """The links, the anchors and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.words = [], [], []
        self.in_link = self.nested = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.nested |= self.in_link and tag == "a"
        self.in_link |= tag == "a"
        self.links += [given[name] for name in ("href", "src", "srcset") if given.get(name)]
        self.anchors += [given[name] for name in ("id", "name") if given.get(name) and tag not in ("meta", "input")]

    def handle_endtag(self, tag):
        self.in_link &= tag != "a"

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = made_once(tmp_path_factory, "site", write) / "site"
    addresses = json.loads((folder.parent / "addresses.json").read_text())
    return folder, {address: Reader((folder / address).read_text()) for address in addresses}


def write(folder):
    (folder / "addresses.json").write_text(json.dumps(build(folder / "site")))


def test_every_link_leads_somewhere(site):
    folder, pages = site
    broken = []
    for address, page in pages.items():
        for link in page.links:
            if re.match(r"(https?|mailto|data):", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(address), path)) if path else address
            if not (folder / target).is_file():
                broken.append(f"{address}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{address}: {link} (no such anchor)")
    assert broken == []


def test_every_page_can_be_reached_from_the_index(site):
    _, pages = site
    reached, waiting = set(), ["index.html"]
    while waiting:
        address = waiting.pop()
        if address in pages and address not in reached:
            reached.add(address)
            folder = posixpath.dirname(address)
            waiting += [
                posixpath.normpath(posixpath.join(folder, link.partition("#")[0])) for link in pages[address].links
            ]
    assert reached == set(pages)


def test_every_room_and_public_name_has_an_entry_with_its_source(site):
    folder, pages = site
    assert {f"looplib/{room}.html" for room in ROOMS} <= set(pages)
    for name in public_names():
        room, _, bare = name.partition(".")
        assert bare in pages[f"looplib/{room}.html"].anchors, name
    text = (folder / "looplib/optim.html").read_text()
    assert "View Source" in text
    assert "def</span>" in text


def test_a_page_of_the_reference_opens_with_a_table_of_its_names(site):
    folder, _ = site
    for room, module in ROOMS.items():
        text = (folder / f"looplib/{room}.html").read_text()
        table = text[text.index('<table class="names">') : text.index("</table>")]
        rows = re.findall(r'<tr>\s*<td><code><a href="#(\w+)">\1</a></code></td>\s*<td>(.*?)</td>', table, re.S)
        assert sorted(name for name, _ in rows) == sorted(module.__all__), room
        assert [name for name, line in rows if not re.sub("<[^>]*>", "", line).strip()] == []
        sections = re.findall(r'<section id="(\w+)">', text)
        assert sections == [name for name, _ in rows]
        if room in ("data", "checkpoint", "schedules"):
            first = {"data": "make_loader", "checkpoint": "checkpoint_io", "schedules": "warmup_cosine"}
            assert sections[0] == first[room]


def test_the_reference_shows_no_attribute_that_only_raises_and_no_private_class(site):
    folder, pages = site
    explained = {"CheckpointIO.resume", "CheckpointIO.load", "Optimizer.zero_grad", "TrainState.loss"}
    for room in ROOMS:
        assert explained.isdisjoint(pages[f"looplib/{room}.html"].anchors)
        text = (folder / f"looplib/{room}.html").read_text()
        signatures = re.findall(r'<span class="signature[^"]*">(.*)', text)
        plain = [re.sub("<[^>]*>", "", signature) for signature in signatures]
        assert [signature for signature in plain if re.search(r"looplib\.|&lt;f|\b_[a-z]|\bself\b", signature)] == []
    signatures = re.findall(
        r'>make_loader</span><span class="signature[^>]*>(.*)', (folder / "looplib/data.html").read_text()
    )
    assert re.sub("<[^>]*>", "", signatures[0]).startswith("(\tdataset: Any,\t*,\tbatch_size: int")


def test_notebooks_recipes_and_documents_are_pages(site):
    folder, pages = site
    sources = [
        *(ROOT / "notebooks").glob("*.ipynb"),
        *(ROOT / "recipes").glob("*.py"),
        *(ROOT / "recipes").glob("*.md"),
    ]
    for path in sources:
        assert path.relative_to(ROOT).with_suffix(".html").as_posix() in pages
    assert list((folder / "notebooks").glob("*.png"))


def test_the_outputs_of_a_notebook_are_tables_and_figures_and_no_names_of_objects(site):
    folder, pages = site
    for address, page in pages.items():
        assert "IPython.core.display" not in "".join(page.words), address
    text = (folder / "notebooks/5_from_a_trainer.html").read_text()
    assert "<th>Validation Loss</th>" in text


def test_figures_on_white_turn_dark_in_the_dark_scheme_and_transparent_ones_stay(site):
    folder, _ = site
    alts = set()
    for page in (folder / "notebooks").glob("*.html"):
        for tag in re.findall(r"<img [^>]*>", page.read_text()):
            name, alt = (re.search(rf'{attribute}="([^"]*)"', tag)[1] for attribute in ("src", "alt"))
            corner = matplotlib.image.imread(folder / "notebooks" / name)[0, 0]
            white = len(corner) < 4 or corner[3] == 1
            assert alt == ("figure on white" if white else "figure"), name
            alts.add(alt)
    assert alts == {"figure", "figure on white"}
    style = (folder / "notebooks/1_quickstart.html").read_text()
    dark = r'@media \(prefers-color-scheme: ?dark\).*img\[alt="figure on white"\] ?\{ ?filter: ?invert'
    assert re.search(dark, style)


def constant(folder, name):
    """Value of a constant in the script of the search."""
    return json.loads(re.search(rf"const {name} = (.*);$", (folder / "search.js").read_text(), re.M)[1])


def test_every_entry_can_be_searched_for(site):
    folder, pages = site
    found = constant(folder, "docs")
    known = {entry["fullname"] for entry in found}
    assert {f"looplib.{name}" for name in public_names()} - known == set()
    assert "Cookbook: Freeze layers" in known
    for entry in found:
        address = f"{entry['modulename'].replace('.', '/')}.html"
        assert entry.get("qualname", "") in ("", *pages[address].anchors), entry["fullname"]


def test_each_word_of_another_library_leads_to_places_that_can_be_found(site):
    folder, _ = site
    known = {f"{entry['modulename']}#{entry.get('qualname', '')}" for entry in constant(folder, "docs")}
    words = constant(folder, "words")
    assert len(words) > 250
    twice = [word for word, count in Counter(word for word, _ in words).items() if count > 1]
    assert not twice, f"{twice} stand in several rows of recipes/WORDS.md: join the rows"
    lost = [(word, places) for word, places in words if not places or not known.issuperset(places)]
    assert not lost, f"these rows of recipes/WORDS.md lead nowhere; give a public name or an entry's anchor: {lost}"


def test_each_name_of_a_trainer_has_a_row_and_leads_to_its_whole_code(site):
    """The search in the browser reads these constants, also in a test where there is node."""
    folder, pages = site
    docs = {(entry["modulename"], entry.get("qualname", "")): entry for entry in constant(folder, "docs")}
    trainers = dict(map(tuple, constant(folder, "trainers")))
    for library in LIBRARIES:
        page = f"recipes.{library.page.stem}"
        reader = pages[f"recipes/{library.page.stem}.html"]
        for full, (answer, _) in library.of_name.items():
            owner, _, name = full.partition(".")
            assert anchor(full) in reader.anchors
            shown = html.unescape(re.sub("<[^>]*>", "", docs[page, answer.anchor]["doc"]))
            assert "".join(answer.code.split()) in "".join(shown.split()), full
            for word in (name, f"{owner.partition(' ')[0]}.{name}"):
                assert f"{page}#{answer.anchor}" in trainers[word.lower()], word
        text = "".join("".join(reader.words).split())
        assert [str(answer) for answer in library.answers if "".join(answer.code.split()) not in text] == []


TWO_NETWORKS = "train-two-networks-with-two-optimizers-a-gan-an-actor-critic"


def test_the_arguments_of_lightnings_trainer_are_words(site):
    trainer = importlib.import_module("lightning.pytorch").Trainer
    words = {
        word.lower() for word, _ in constant(site[0], "words")
    }  # the search does not tell Accelerator from accelerator
    assert inspect.signature(trainer).parameters.keys() - words == set()


# The search as it runs in the browser: one JSON list of the places found first, per term.
SEARCH = """
const window = {};
require("vm").runInNewContext(require("fs").readFileSync("search.js", "utf8"), { window, console });
const place = ({ doc }) => `${doc.modulename}#${doc.qualname ?? ""}`;
const terms = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(terms.map((term) => window.pdocSearch(term).slice(0, 10).map(place))));
"""


def searched(folder, terms):
    command = [shutil.which("node"), "-e", SEARCH]
    done = subprocess.run(command, cwd=folder, input=json.dumps(terms), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(terms, json.loads(done.stdout), strict=True))


@pytest.mark.skipif(not shutil.which("node"), reason="the search runs in node")
def test_a_word_of_another_library_finds_its_place_first(site):
    folder, _ = site
    words = dict(map(tuple, constant(folder, "words")))
    found = searched(folder, list(words))
    assert {word: places[0] for word, places in found.items()} == {word: places[0] for word, places in words.items()}
    assert [word for word, places in found.items() if len(set(places)) < len(places)] == []
    asked = {
        "how to clip gradients": "looplib.optim#clip_by_global_norm",
        "Clip grad norm": "looplib.optim#clip_by_global_norm",
        "onecyc": "looplib.schedules#one_cycle",
        "multi gpu training": "recipes.COOKBOOK_CHECKPOINTS#use-several-gpus",
        "num_items_in_batch": "recipes.FROM_TRANSFORMERS_NAMES#trainer-_get_num_items_in_batch",
        "make_loader": "looplib.data#make_loader",
        "ll.optim.ema": "looplib.optim#ema",
        "worst_samples": "looplib.debug#worst_samples",
        "hyperparameter gradient": "looplib.transforms#differentiable",
        "padding loss": "recipes.COOKBOOK_LOSSES#average-a-loss-over-tokens-or-under-a-mask",
        "two states checkpoint": f"recipes.COOKBOOK_NETWORKS#{TWO_NETWORKS}",
        "interrupt evaluation": "recipes.COOKBOOK_CHECKPOINTS#interrupt-and-continue-ctrl-c-the-stop-button",
    }
    assert {term: places[0] for term, places in searched(folder, list(asked)).items()} == asked
    assert found["same_batch"][:2] == ["looplib.steps#make_train_step", f"recipes.COOKBOOK_NETWORKS#{TWO_NETWORKS}"]


# What users of other libraries type, and the first place that the search gives. Calls are cut out of their lines.
TYPED = {
    # torch
    "optimizer.zero_grad()": "recipes.FROM_A_RAW_LOOP#",
    "loss.backward()": "recipes.FROM_A_RAW_LOOP#",
    "optimizer.step()": "recipes.FROM_A_RAW_LOOP#",
    "lr_scheduler.step": "recipes.COOKBOOK_OPTIMIZERS#warm-up-and-decay-the-learning-rate",
    "clip_grad_norm_": "looplib.optim#clip_by_global_norm",
    "torch.amp.autocast": "looplib.losses#autocast",
    "GradScaler": "looplib.optim#dynamic_loss_scale",
    "DataLoader": "looplib.data#make_loader",
    "num_workers": "looplib.data#make_loader",
    "collate_fn": "looplib.data#make_loader",
    "sampler.set_epoch(epoch)": "looplib.data#shuffled",
    "WeightedRandomSampler": "looplib.data#weighted",
    "IterableDataset": "recipes.COOKBOOK_DATA#train-on-a-stream",
    "state_dict": "recipes.COOKBOOK_CHECKPOINTS#save-the-model",
    "load_state_dict": "recipes.COOKBOOK_CHECKPOINTS#start-from-saved-weights",
    "torch.save": "looplib.checkpoint#checkpoint_io",
    "DistributedDataParallel": "recipes.COOKBOOK_CHECKPOINTS#use-several-gpus",
    "FSDP": "recipes.README#language_model_fsdp",
    "torchrun": "recipes.COOKBOOK_CHECKPOINTS#use-several-gpus",
    "no_sync": "looplib.grads#accumulate",
    "dist.all_reduce": "looplib.distributed#reduce",
    "model.eval()": "looplib.steps#make_eval_step",
    "torch.no_grad()": "looplib.steps#make_eval_step",
    "requires_grad_": "recipes.COOKBOOK_OPTIMIZERS#freeze-layers",
    "torch.manual_seed": "looplib.state#init_state",
    "torch.compile": "looplib.transforms#compile_step",
    "torch.utils.checkpoint": "looplib.losses#recompute",
    "update_bn": "looplib.evaluation#recompute_batch_norm",
    "AveragedModel": "looplib.optim#ema",
    "ReduceLROnPlateau": "looplib.optim#reduce_on_plateau",
    "param_groups": "recipes.COOKBOOK_OPTIMIZERS#use-different-learning-rates-per-layer",
    # transformers
    "Trainer": "recipes.FROM_LIGHTNING#",
    "TrainingArguments": "recipes.FROM_TRANSFORMERS#",
    "TrainerCallback": "looplib.predicates#Predicate",
    "compute_metrics": "looplib.steps#make_eval_step",
    "compute_loss": "looplib.gradients#make_grad_fn",
    "per_device_train_batch_size": "recipes.COOKBOOK_CHECKPOINTS#continue-with-another-number-of-processes",
    "gradient_accumulation_steps": "looplib.grads#accumulate",
    "eval_strategy": "looplib.evaluation#evaluate",
    "load_best_model_at_end": "recipes.COOKBOOK_CHECKPOINTS#keep-the-best-checkpoint",
    "resume_from_checkpoint": "recipes.COOKBOOK_CHECKPOINTS#resume-a-run",
    "warmup_ratio": "looplib.schedules#warmup_cosine",
    "report_to": "looplib.log#tracker",
    "push_to_hub": "recipes.COOKBOOK_CHECKPOINTS#push-to-the-hugging-face-hub",
    "DataCollatorWithPadding": "looplib.data#by_length",
    # Lightning
    "Lightning": "recipes.FROM_LIGHTNING#",
    "training_step": "recipes.FROM_LIGHTNING#",
    "validation_step": "looplib.steps#make_eval_step",
    "configure_optimizers": "looplib.optim#optimizer",
    "seed_everything": "looplib.state#init_state",
    "EarlyStopping": "looplib.predicates#early_stopping",
    "ModelCheckpoint": "looplib.checkpoint#checkpoint_io",
    "self.log": "recipes.COOKBOOK_LOGS#log-the-mean-loss-since-the-last-line",
    "log_every_n_steps": "looplib.predicates#every_n_steps",
    "overfit_batches": "recipes.COOKBOOK_LOGS#overfit-one-batch",
    "manual_backward": f"recipes.COOKBOOK_NETWORKS#{TWO_NETWORKS}",
    "LightningDataModule": "looplib.data#make_loader",
    "fast_dev_run": "looplib.data#make_loader",
    "load_from_checkpoint": "looplib.checkpoint#checkpoint_io",
    "Callback": "recipes.FROM_LIGHTNING#what-changes",
    "on_train_epoch_end": "recipes.FROM_LIGHTNING#what-changes",
    "EMAWeightAveraging": "looplib.optim#ema",
    # accelerate
    "accelerator.prepare": "recipes.FROM_ACCELERATE#",
    "accelerator.backward(loss)": "recipes.FROM_ACCELERATE#",
    "accelerator.gather_for_metrics": "looplib.evaluation#evaluate",
    "accelerator.save_state": "looplib.checkpoint#checkpoint_io",
    "accelerator.clip_grad_norm_": "looplib.optim#clip_by_global_norm",
    "accelerator.is_main_process": "looplib.distributed#is_rank_zero",
    "accelerator.wait_for_everyone()": "looplib.distributed#barrier",
    "accelerator.unwrap_model": "recipes.COOKBOOK_CHECKPOINTS#save-the-model",
    "skip_first_batches": "recipes.CONCEPTS#positions",
    "find_executable_batch_size": "recipes.COOKBOOK_LOSSES#retry-a-batch-in-smaller-microbatches",
    # what readers did not find
    "average of one network": "recipes.COOKBOOK_OPTIMIZERS#average-the-weights-of-one-network-a-gans-generator",
    "redo BatchNorm": "looplib.evaluation#recompute_batch_norm",
    "mean over batches": "recipes.COOKBOOK_LOSSES#average-over-batches-and-not-over-samples",
    "resume my own torch optimizer": "recipes.COOKBOOK_CHECKPOINTS#resume-my-own-torch-optimizer",
    "check_replicas": "looplib.distributed#check_replicas",
    "assert_ranks_train_alike": "looplib.testing#assert_ranks_train_alike",
    "resume training": "recipes.COOKBOOK_CHECKPOINTS#resume-a-run",
    "CUDA out of memory": "recipes.COOKBOOK_LOSSES#retry-a-batch-in-smaller-microbatches",
    "SFTTrainer": "recipes.FINE_TUNING#",
    "DPO": "looplib.gradients#make_grad_fn",
    "RLHF": "recipes.README#grpo_arithmetic",
    "BatchSizeFinder": "recipes.COOKBOOK_LOSSES#retry-a-batch-in-smaller-microbatches",
    "8bit adam": "recipes.COOKBOOK_OPTIMIZERS#keep-the-optimizers-state-in-8-bits",
    "nn.DataParallel": "recipes.COOKBOOK_CHECKPOINTS#use-several-gpus",
    "multi-node": "recipes.COOKBOOK_CHECKPOINTS#use-several-gpus",
    "accelerate": "recipes.FROM_ACCELERATE#",
    "set_grad_enabled": "looplib.steps#make_eval_step",
    "set_detect_anomaly": "recipes.COOKBOOK_LOGS#debug-a-nan",
    "torch.load weights_only": "recipes.COOKBOOK_CHECKPOINTS#start-from-saved-weights",
    "map_location": "recipes.COOKBOOK_CHECKPOINTS#start-from-saved-weights",
    "hyperparameter tuning": "recipes.README#optuna_pruning",
    "validation split": "recipes.COOKBOOK_LOGS#evaluate-after-every-epoch",
    "replay buffer": "recipes.COOKBOOK_NETWORKS#sample-by-priority-prioritized-replay",
    "epoch mean after resume": "recipes.COOKBOOK_LOGS#log-the-mean-loss-since-the-last-line",
}


@pytest.mark.skipif(not shutil.which("node"), reason="the search runs in node")
def test_what_users_of_other_libraries_type_leads_to_its_page(site):
    assert len(TYPED) >= 60
    assert {term: places[0] for term, places in searched(site[0], list(TYPED)).items()} == TYPED


def test_the_search_shows_code_and_no_markup(site):
    for entry in constant(site[0], "docs"):
        shown = html.unescape(re.sub("<[^>]*>", "", entry.get("signature", "") + entry.get("doc", "")))
        assert not re.search(r"</?(span|code|div)\b|^```", shown, re.M), entry["fullname"]


@pytest.mark.skipif(not shutil.which("node"), reason="the search runs in node")
def test_a_name_of_a_trainer_finds_its_rows_after_words_and_looplibs_own(site):
    folder, _ = site
    rows = {}
    for library in LIBRARIES:
        for full, (answer, _) in library.of_name.items():
            owner, _, name = full.partition(".")
            for word in (name, f"{owner.partition(' ')[0]}.{name}"):
                rows.setdefault(word.lower(), []).append(f"recipes.{library.page.stem}#{answer.anchor}")
    assert len(rows) > 1200
    earlier = {word.lower(): places for word, places in constant(folder, "words")}
    for name in public_names():
        room, _, bare = name.lower().partition(".")
        earlier.setdefault(bare, []).append(f"looplib.{name.replace('.', '#')}")
        earlier.setdefault(room, []).append(f"looplib.{room}#")
    missed = {}
    for name, found in searched(folder, list(rows)).items():
        places = [place for place in found if place not in earlier.get(name, ())]
        if places[0] != rows[name][0]:
            missed[name] = found[:3]
    assert missed == {}


def test_names_in_texts_and_code_lead_to_their_entries(site):
    _, pages = site
    assert "../looplib/optim.html#partition" in pages["recipes/COOKBOOK_NETWORKS.html"].links
    assert "../looplib/steps.html#make_train_step" in pages["recipes/CHEAT_SHEET.html"].links
    assert "looplib/data.html#make_loader" in pages["index.html"].links


def test_no_link_stands_within_a_link(site):
    assert [address for address, page in site[1].items() if page.nested] == []


def test_pages_show_no_addresses_of_objects(site):
    _, pages = site
    for address, page in pages.items():
        if address.startswith("looplib/"):
            text = "".join(page.words)
            assert not re.search(r"<(function|class|object)[^>]* at 0x|inspect\._empty", text), address
