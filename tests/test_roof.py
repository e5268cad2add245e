"The roof: what the runner promises about records, crashes and budgets; pictures from live objects; checks"
import json, os, time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

import sample_experiments
from minisgl_edu import checks, draw, experiments
from minisgl_edu.core import Batch, Req, SamplingParams

SAMPLES = ["sample_bad", "sample_dead", "sample_good"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    "The runner's children find the sample experiments; every figure is closed"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("MINISGL_QUICK", raising=False)
    yield
    plt.close("all")


# --- experiments ------------------------------------------------------------------------------------------------------

def test_record_has_what_a_reader_needs(tmp_path):
    record = experiments.run_experiment("sample_good", quick=True, seed=3)
    assert record["rows"][2] == dict(n=2, square=4, seed=3, quick=True) and record["units"] == {"square": "m2"}
    needed = {"kind", "device", "driver", "python", "torch", "triton", "transformers", "commit", "date", "seed", "threads", "quick"}
    assert needed <= set(record["provenance"])
    assert json.loads(experiments.save_record(record, tmp_path / "new").read_text()) == record


def test_a_crash_loses_no_other(tmp_path, capsys):
    summaries = experiments.run_all(tmp_path, only=SAMPLES, quick=True)
    assert {s["name"]: s["status"] for s in summaries} == dict(sample_good="done", sample_bad="crashed", sample_dead="crashed")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["sample_bad.error.json", "sample_dead.error.json", "sample_good.json"]
    crash = json.loads((tmp_path / "sample_bad.error.json").read_text())
    assert crash["error"] == "ZeroDivisionError: no luck" and "sample_bad" in crash["traceback"]
    assert "9" in json.loads((tmp_path / "sample_dead.error.json").read_text())["error"]


def test_a_crash_keeps_the_record_from_before(tmp_path, monkeypatch):
    experiments.run_all(tmp_path, only="sample_good", isolate=False)
    before = (tmp_path / "sample_good.json").read_bytes()
    monkeypatch.setattr(experiments.REGISTRY["sample_good"], "fn", sample_experiments.sample_bad)
    experiments.run_all(tmp_path, only="sample_good", isolate=False)
    assert (tmp_path / "sample_good.json").read_bytes() == before and (tmp_path / "sample_good.error.json").exists()
    monkeypatch.undo()
    experiments.run_all(tmp_path, only="sample_good", isolate=False)
    assert not (tmp_path / "sample_good.error.json").exists()


def test_what_is_missing_here_leaves_a_record_that_says_so(tmp_path):
    summaries = experiments.run_all(tmp_path / "cpu", only="sample_missing", quick=True)
    assert summaries[0]["status"] == "done" and not (tmp_path / "cpu" / "sample_missing.error.json").exists()
    record = json.loads((tmp_path / "cpu" / "sample_missing.json").read_text())
    assert record["rows"] == [{"skipped": "FileNotFoundError: no such model"}] and record["provenance"]["kind"] == "cpu"
    assert experiments.recorded("sample_missing", root=tmp_path) == []  # nothing was measured
    before = dict(record, rows=[{"ms": 1.0}])
    experiments.save_record(before, tmp_path / "cpu")
    experiments.run_all(tmp_path / "cpu", only="sample_missing", quick=True, isolate=False)
    assert experiments.recorded("sample_missing", root=tmp_path) == [before]


def test_budget_stops_what_hangs_and_skips_the_rest(tmp_path):
    for name, seconds in dict(sample_slow=0.1, sample_good=500.0).items():  # as if they had run before
        record = dict(name=name, rows=[{}], seconds=seconds, provenance=dict(kind="cpu", quick=False))
        experiments.write_json(tmp_path / f"{name}.json", record)
    start = time.monotonic()
    summaries = experiments.run_all(tmp_path, only=["sample_good", "sample_slow"], budget=6)
    assert [(s["name"], s["status"]) for s in summaries] == [("sample_slow", "crashed"), ("sample_good", "skipped")]
    assert time.monotonic() - start < 60 and "budget" in summaries[0]["error"]


def test_shortest_first(tmp_path):
    for name, seconds in dict(sample_bad=3.0, sample_good=2.0).items():
        experiments.write_json(tmp_path / f"{name}.json", dict(seconds=seconds, provenance=dict(kind="cpu", quick=True)))
    assert [s["name"] for s in experiments.run_all(tmp_path, only=SAMPLES[:1] + SAMPLES[2:], quick=True, isolate=False)] == ["sample_good", "sample_bad"]


@pytest.mark.parametrize("rows", [None, [], [1], {"a": 1}, [dict(x=float("nan"))], [dict(x=float("inf"))], [dict(x=object())], [dict(x=1)]])
def test_bad_rows_are_refused(rows, monkeypatch):
    "The last one lacks the column that has a unit"
    monkeypatch.setattr(experiments.REGISTRY["sample_good"], "fn", lambda **kw: rows)
    with pytest.raises(ValueError, match="sample_good"): experiments.run_experiment("sample_good")


def test_registry_replaces_within_a_chapter_only():
    def sample_good(device="cpu", quick=False, seed=0): "Another"
    with pytest.raises(ValueError, match="99_tests"): experiments.experiment("07_kvcache")(sample_good)
    old = experiments.REGISTRY["sample_good"]
    try:
        experiments.experiment("99_tests")(sample_good)
        assert experiments.REGISTRY["sample_good"].fn is sample_good
    finally: experiments.REGISTRY["sample_good"] = old
    with pytest.raises(ValueError, match="no experiment named 'nothing'"): experiments.run_experiment("nothing")


def test_recorded_shows_only_measurements(tmp_path):
    record = experiments.run_experiment("sample_good", quick=True)
    gpu = {**record, "provenance": {**record["provenance"], "kind": "cuda"}}
    experiments.save_record(record, tmp_path / "cpu")
    experiments.save_record(gpu, tmp_path / "nvidia-h200")
    experiments.save_record({**record, "rows": []}, tmp_path / "empty")
    assert experiments.recorded("sample_good", root=tmp_path) == [record, gpu]
    assert experiments.recorded("sample_good", kind="cuda", root=tmp_path) == [gpu]
    assert experiments.recorded("sample_bad", root=tmp_path) == []


def test_nothing_half_written(tmp_path):
    with pytest.raises(ValueError): experiments.write_json(tmp_path / "a.json", dict(x=float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_ladder(tmp_path, monkeypatch):
    ladder = experiments.Ladder(tmp_path / "deep" / "ladder.json")
    assert ladder.rungs() == []
    ladder.add_rung("batching", 80, "16_scheduler", low=70.0)
    ladder.add_rung("naive", 8, "06_models")
    ladder.add_rung("batching", 90, "16_scheduler")
    assert [(r["label"], r["tokens_per_s"]) for r in ladder.rungs()] == [("naive", 8.0), ("batching", 90.0)]
    saved = ladder.path.read_bytes()
    monkeypatch.setenv("MINISGL_QUICK", "1")
    ladder.add_rung("batching", 1, "16_scheduler")
    assert ladder.rungs()[1]["tokens_per_s"] == 1.0 and ladder.path.read_bytes() == saved


def test_command_line(tmp_path, capsys, monkeypatch):
    assert experiments.main(["--list"]) == 0 and "sample_good" in capsys.readouterr().out
    assert experiments.main(["--only", "sample_good", "--quick", "--seed", "5", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "sample_good.json").read_text())["provenance"]["seed"] == 5
    assert experiments.main(["--only", "sample_bad", "--quick", "--out", str(tmp_path)]) == 1
    with pytest.raises(SystemExit): experiments.main(["--only", "nothing", "--out", str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert experiments.main(["--only", "sample_good", "--quick"]) == 0 and (tmp_path / "measurements" / "sample_good.json").exists()  # the folder where nothing is said


# --- draw -------------------------------------------------------------------------------------------------------------

def live(uid, cached_len, device_len, pages):
    req = Req(uid, range(max(device_len, 1)), SamplingParams(max_tokens=4))
    req.cached_len, req.device_len, req.pages, req.table_idx = cached_len, device_len, pages, uid
    return req


def test_map_is_deterministic_and_complete():
    svg = draw._map_svg({"scheduler"})
    assert svg == draw._map_svg({"scheduler"}) and svg.count(draw.ACCENT) == 2  # fill and edge of one box
    for _, boxes in draw.PARTS:
        for box in boxes: assert f">{box}</text>" in svg
    with pytest.raises(ValueError, match="nowhere"): draw.engine_map("nowhere")


@pytest.mark.parametrize("free, cached, wrong", [
    ([2, 3], [], []),                # all well
    ([2], [], [3]),                  # lost
    ([1, 2, 3], [], [1]),            # free and held
    ([2, 3], [3], [3]),              # free and cached
    ([2, 3], [0], []),               # held by way of the cache
])
def test_page_state_names_lost_and_shared_pages(free, cached, wrong):
    owners = {0: [7], 1: [7]}
    red = [p for p in range(4) if draw._page_state(p, owners, set(free), set(cached))[0] == draw.WRONG]
    assert red == wrong


def test_page_held_twice_is_wrong_unless_cached():
    assert draw._page_state(0, {0: [1, 2]}, set(), set())[0] == draw.WRONG
    assert draw._page_state(0, {0: [1, 2]}, set(), {0})[0] == draw.request_colour(1)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("num_pages", [1, 16, 300])
def test_page_table_draws_any_pool(page_size, num_pages):
    held = list(range(num_pages // 2))
    reqs = [live(0, len(held) * page_size, len(held) * page_size, held)] if held else []
    assert draw.page_table(reqs, page_size, num_pages, range(len(held), num_pages)) is None


def test_timeline_takes_batches_and_dictionaries():
    reqs = [live(0, 5, 6, [0]), live(3, 0, 9, [1, 2])]
    assert draw._entries(Batch(reqs, "mixed")) == [(0, "decode", 1), (3, "prefill", 9)]
    assert draw._entries(dict(uid=1, phase="decode", tokens=1)) == [(1, "decode", 1)]
    draw.batch_timeline([Batch(reqs, "mixed"), [dict(uid=0, phase="decode", tokens=1)]] * 40, title="A long one")
    ax = plt.gca()
    assert {"request 0", "request 3"} <= {t.get_text() for t in ax.texts}


def test_plots_mark_the_four_kinds():
    fig, ax = plt.subplots()
    draw.predicted(ax, [1, 2], [1, 2])
    draw.measured(ax, [1, 2], [1, 2], [0.9, 1.8], [1.1, 2.2])
    draw.recorded_points(ax, [1, 2], [1, 2], dict(provenance=dict(device="NVIDIA H200")))
    draw.simulated(ax, [1, 2], [1, 2])
    assert [l.get_linestyle() for l in ax.get_lines()] == ["--", "-", "-", ":"]
    hollow = ax.get_lines()[2]
    assert hollow.get_markerfacecolor() == draw.PAPER and "NVIDIA H200" in hollow.get_label()
    draw.label_lines(ax)
    assert len(ax.texts) == 4 and len({t.xyann[1] for t in ax.texts}) > 1  # equal ends do not overlap
    draw.provenance_line(fig, experiments.provenance(), "batch 1")
    assert "batch 1" in fig._supxlabel.get_text() and experiments.provenance()["date"] in fig._supxlabel.get_text()


def test_bars_start_at_zero_and_show_predictions():
    fig, ax = plt.subplots()
    draw.bars(ax, ["a", "b"], [1.0, 2.0], [0.9, 1.5], [1.2, 2.5], predicted=[None, 3.0], baseline=("a",))
    assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 3
    assert matplotlib.colors.to_hex(ax.patches[0].get_facecolor()) == draw.BASELINE
    assert "predicted" in {t.get_text() for t in ax.texts}


# --- checks -----------------------------------------------------------------------------------------------------------

def test_check_median_tells_mistakes_apart(capsys):
    right = lambda t: (sorted(t)[(len(t) - 1) // 2] + sorted(t)[len(t) // 2]) / 2
    assert checks.solved_or_not("median", right).status == "solved"
    reasons = {checks.solved_or_not("median", f).reason for f in (lambda t: t[len(t) // 2], lambda t: sorted(t)[len(t) // 2], lambda t: [][0], lambda t: 5)}
    assert len(reasons) == 4 and all(reasons)
    def in_place(t): t.sort(); return right(t)
    assert "sort a copy" in checks.solved_or_not("median", in_place).reason
    assert checks.check_median(right) is None and capsys.readouterr().out == "median: solved\n"


def test_untouched_stubs():
    def documented(x): "What it should do"
    def dots(x): ...
    def raising(x): raise NotImplementedError("your code here")
    def passing(x):
        "Doc"
        pass
    for stub in (None, ..., documented, dots, raising, passing): assert checks.solved_or_not("median", stub).status == "not solved yet"
    for answer in (0, [], lambda t: 0): assert checks.solved_or_not("median", answer).status == "wrong"


def test_one_check_per_exercise():
    with pytest.raises(ValueError, match="median"): checks.check("median")(lambda answer: None)
    with pytest.raises(ValueError, match="no exercise"): checks.solved_or_not("nothing", 1)
