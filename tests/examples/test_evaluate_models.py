"""lm-eval's results for a model are those of its logits, text by text; the solves are counted."""

import json
import math
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from corpus import train_tokenizer
from tokenizers.processors import TemplateProcessing

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm

pytestmark = pytest.mark.evaluation

SCRIPT = Path(__file__).parents[2] / "examples" / "evaluate.py"
STORIES = [
    f"{name} has a {colour} {thing}. {weather} {name} met {friend}. Then {name} gave {friend} the "
    f"{thing}."
    for name, friend, thing in (("Ann", "Bo", "ball"), ("Christopher", "Ann", "umbrella"))
    for colour in ("red", "blue")
    for weather in ("It rained.", "The sun was shining all day long.")
]
KINDS = ("implicit mamba2", "explicit mamba2", "implicit llama", "explicit llama")


@cache
def tokenizer(kind="plain"):
    """A byte-level BPE whose BOS token nobody asks for; ``adds bos``; or ``none``: no special
    token.
    """
    made = train_tokenizer(STORIES, 300)
    if kind == "none":
        made.bos_token = made.eos_token = made.pad_token = None
    elif kind == "adds bos":
        parts = {"single": "<|endoftext|> $A", "special_tokens": [("<|endoftext|>", 0)]}
        made.backend_tokenizer.post_processor = TemplateProcessing(**parts)
    return made


def model(kind):
    """In float64; solves converge."""
    torch.manual_seed(0)
    implicit = kind.startswith("implicit")
    if kind.endswith("mamba2"):
        backbone = dq.Mamba2(
            dq.Mamba2Config(d_model=16, d_state=4, headdim=8, weight_norm=False, injection=implicit)
        )
    else:
        backbone = dq.Llama(
            dq.LlamaConfig(
                d_model=16, n_heads=2, mlp_width=24, weight_norm=False, injection=implicit
            )
        )
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            weight.mul_(30 if "injection" in name else 1)  # the map contracts
    solve = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-7, max_steps=200))
    core = dq.ImplicitModel(backbone, solve) if implicit else dq.ExplicitModel(backbone)
    return from_causal_lm(dq.CausalLM(300, core), eos_token_id=0).double().eval()


def evaluated(kind, words="plain", **options):
    """lm-eval's model."""
    from deqseq.integrations.lm_eval import SolvedLM  # of an extra that the other tests do without

    return SolvedLM(model(kind), tokenizer(words), **options)


def ask(lm, request, *arguments):
    from lm_eval.api.instance import Instance

    return getattr(lm, request)(
        [Instance(request, {}, one, n) for n, one in enumerate(arguments)], disable_tqdm=True
    )


def by_hand(lm, before, after):
    """Log-probability of tokens behind others, and whether each is the likeliest."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([[*before, *after[:-1]]])).logits[0]
    table = logits.log_softmax(-1)[-len(after) :]
    score = sum(row[token].item() for row, token in zip(table, after, strict=True))
    return pytest.approx(score, abs=1e-8), table.argmax(-1).tolist() == after


def questions():
    """Passages without their last word, and that word."""
    return [(story.rpartition(" ")[0], " " + story.rpartition(" ")[2]) for story in STORIES]


@pytest.mark.parametrize("kind", KINDS)
def test_continuations_are_scored_as_by_hand(kind):
    lm, words = evaluated(kind, batch_size=5), tokenizer()
    for (context, target), found in zip(
        questions(), ask(lm, "loglikelihood", *questions()), strict=True
    ):
        whole, before = words.encode(context + target), words.encode(context)
        assert found == by_hand(lm, before, whole[len(before) :])


def test_texts_begin_with_bos_if_the_tokenizer_says_so():
    lm, plain = evaluated("implicit llama", "adds bos"), tokenizer()
    for (context, target), found in zip(
        questions(), ask(lm, "loglikelihood", *questions()), strict=True
    ):
        whole, before = plain.encode(context + target), plain.encode(context)
        assert found == by_hand(lm, [0, *before], whole[len(before) :])
    bare = evaluated("implicit llama", "none")
    (found,) = ask(bare, "loglikelihood", ("Ann has", " a"))
    assert found == by_hand(bare, plain.encode("Ann has"), plain.encode(" a"))


@pytest.mark.parametrize("words", ["plain", "adds bos"])
@pytest.mark.parametrize("longest", [1000, 7])
def test_whole_texts_are_predicted_token_by_token_each_once(words, longest):
    lm = evaluated("implicit mamba2", words, max_length=longest, batch_size=3)
    texts = [*STORIES[:3], "Ann met Bo."]
    for text, found in zip(
        texts, ask(lm, "loglikelihood_rolling", *((text,) for text in texts)), strict=True
    ):
        ids, total = [0, *tokenizer().encode(text)], 0.0  # the end of text stands before
        for begin, end in pairwise([*range(0, len(ids) - 1, longest), len(ids) - 1]):
            before = ids[
                max(0, end - longest) : begin + 1
            ]  # a last window that is short sees more of what came before
            total += by_hand(lm, before, ids[begin + 1 : end + 1])[0].expected
        assert found == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("kind", ["implicit mamba2", "implicit llama"])
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3)])
def test_the_batch_decides_nothing_and_only_texts_are_counted(kind, sweep):
    solve = {"sweep": sweep, "stop": dq.Stop(rtol=1e-4, max_steps=200)}
    one, many = (evaluated(kind, solve=solve, batch_size=size) for size in (1, 16))
    context, target = questions()[0]
    asked = [
        *questions(),
        *((f"{letter} {context}", target) for letter in "xyz"),
    ]  # these are of one length
    alone, together = ask(one, "loglikelihood", *asked), ask(many, "loglikelihood", *asked)
    assert [nats for nats, _ in together] == pytest.approx([nats for nats, _ in alone], abs=1e-10)
    rows = [torch.tensor([tokenizer().encode(story)[:-1]]) for story in map("".join, asked)]
    with torch.no_grad():
        stats = [one.model(row, solve=solve).stats for row in rows]
    steps = torch.cat([each.iterations.flatten() for each in stats]).double()
    for lm in (one, many):
        numbers = lm.tally()
        assert numbers["self_iterations"] == pytest.approx(steps.mean().item())
        assert (numbers["converged"], lm.counted["converged of"]) == (1, len(rows))
        assert lm.counted["token_updates of"] == steps.numel()  # and no padding
    assert (
        many.tally()["evaluations"]
        < one.tally()["evaluations"]
        == sum(s.evaluations for s in stats)
    )


PROMPTS = ("Ann", "Bo has a red", "Christopher met Ann. Then")


def continued(lm):
    return ask(
        lm,
        "generate_until",
        *((prompt, {"until": ["\n\n"], "max_gen_toks": 5}) for prompt in PROMPTS),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_unequal_length_are_continued_as_alone(kind):
    lm, words = evaluated(kind, batch_size=3), tokenizer()
    for prompt, found in zip(PROMPTS, continued(lm), strict=True):
        ids = words.encode(prompt)
        for _ in range(5):
            with torch.no_grad():
                ids.append(lm.model(torch.tensor([ids])).logits[0, -1].argmax().item())
        text = words.decode(ids).removeprefix(prompt)
        assert found == text.partition("<|endoftext|>")[0].partition("\n\n")[0]
    assert lm.tally()["converged"] == (1 if kind.startswith("implicit") else None)


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_generation_is_solved_as_told_and_padding_is_not_counted():
    solve = {"sweep": "Sliding", "stop": {"max_steps": 2, "rtol": 0.0}}
    lm = evaluated("implicit mamba2", solve=solve, batch_size=3)
    continued(lm)
    prompted = sum(len(tokenizer().encode(prompt)) for prompt in PROMPTS)
    assert (
        lm.counted["self_iterations of"] == prompted + 3 * 4
    )  # the last of five tokens needs no solve
    assert lm.counted["converged of"] == 3 * 5
    assert (lm.tally()["converged"], lm.tally()["converged_tokens"]) == (0, 0)


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="leave out solve: "):
        evaluated("explicit mamba2", solve={"sweep": "Sequential"})
    with pytest.raises(ValueError, match="sweeep"):
        evaluated("implicit mamba2", solve={"sweeep": "Sequential"})
    with pytest.raises(ValueError, match="an empty context needs a token to begin with"):
        ask(evaluated("explicit mamba2", "none"), "loglikelihood_rolling", ("Ann",))
    with pytest.raises(ValueError, match=r"a continuation of \d+ tokens is longer than"):
        ask(
            evaluated("explicit mamba2", max_length=4),
            "loglikelihood",
            ("Ann", " has a red ball. It rained."),
        )


def test_the_command_line_of_lm_eval_has_our_models(tmp_path):
    model("implicit mamba2").float().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": story}) + "\n" for story in STORIES)
    )
    data = {
        "data_files": {"test": str(tmp_path / "data.jsonl")},
        "cache_dir": str(tmp_path / "cache"),
    }
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "doc_to_text": "",
    }
    task |= {"output_type": "loglikelihood_rolling", "doc_to_target": "text"}
    (tmp_path / "own.yaml").write_text(
        json.dumps(task | {"metric_list": [{"metric": "bits_per_byte"}]})
    )
    solve = {"sweep": "Sequential", "stop": {"max_steps": 1, "rtol": 0.0}}
    given = json.dumps({"pretrained": str(tmp_path / "model"), "solve": solve})
    flags = ["--model", "deqseq", "--model_args", given, "--tasks", "own", "--batch_size", "4"]
    flags += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    command, variables = (
        [sys.executable, str(SCRIPT), "run", *flags],
        os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    lm = evaluated("implicit mamba2", solve=solve)
    nats = sum(ask(lm, "loglikelihood_rolling", *((story,) for story in STORIES)))
    size = sum(len(story.encode()) for story in STORIES)
    assert found["results"]["own"]["bits_per_byte,none"] == pytest.approx(
        -nats / math.log(2) / size, rel=1e-4
    )
    assert found["config"]["solves"]["self_iterations"] == 1
    assert "solves: " in done.stdout
