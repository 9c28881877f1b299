"""Wrong commands exit with 2, print one message that names the fault, and write nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from zoo.cli import main

#: Options of other trainers -> the corresponding setting or option.
HINTS = {
    "--lr 0.1": "--set optimizer.learning_rate=VALUE",
    "--lr=0.1": "--set optimizer.learning_rate=VALUE",
    "--learning-rate 0.1": "--set optimizer.learning_rate=VALUE",
    "--momentum 0.8": "--set optimizer.momentum=VALUE",
    "--label-smoothing 0.1": "--set optimizer.label_smoothing=VALUE",
    "--num-classes 3": "--set network.num_classes=VALUE",
    "--freeze stem": "--set optimizer.freeze=VALUE",
    "--layer-decay 0.7": "--set optimizer.layer_decay=VALUE",
    "--class-weights balanced": "--set regularization.class_weights=VALUE",
    "--early-stopping 3": "--set optimizer.schedule.patience=VALUE",
    "--keep-best 3": "--set checkpoint.keep_best=VALUE",
    "--amp": "--set training.amp=VALUE",
    "--device cpu": "CUDA_VISIBLE_DEVICES",
    "--crop 96": "--set input.crop_train=VALUE --set input.crop_val=VALUE",
    "--batch_size 4": "--batch-size",
    "--set optimizer.learning_rate": "'optimizer.learning_rate'",
    "--helpp": "--helpp",
}
#: Commands that argparse refuses: it prints the usage of the command.
USAGE: list[tuple[str, list[str]]] = [
    *((f"train resnet18 data {option}", [words]) for option, words in HINTS.items()),
    ("trian a b", ["'trian'"]),
    ("data", ["KIND"]),
    ("data check resnet18 data --worker_s 3", ["--workers"]),
    ("validate resnet18 data --batchsize 3", ["--batch-size"]),
    ("list --no-such-thing", ["--no-such-thing"]),
    ("segment a b c --scales=__import__('os').abort()", ["--scales", "float"]),
    ("benchmark layer --shapes 2", ["--shapes"]),
    ("benchmark layer --rounds 0", ["--rounds"]),
    ("benchmark model resnet18 --budgets 2", ["--budgets"]),
    ("benchmark model resnet18 --budgets", ["--budgets"]),
    ("benchmark lean --budgets --compiled-budgets 0.4", ["--budgets"]),
]
#: Other commands. CONFIG, DATA, LOG and CHECKPOINT are of a finished run; OUT must not exist afterwards.
WRONG: list[tuple[str, list[str]]] = [
    ("train no-such-file.json DATA", ["no-such-file.json"]),
    ("train resnet19 DATA --log-dir OUT", ["resnet19", "resnet18"]),
    ("train deeplab_resnet18 DATA --log-dir OUT", ["deeplab_resnet18", "layout"]),
    ("train torchvision:resnet19 DATA --log-dir OUT", ["torchvision", "'resnet19'"]),
    *(
        (f"train resnet32_cifar DATA --log-dir OUT --set {change}", names)
        for change, names in [
            ("optimizer.learning_rat=1", ["optimizer.learning_rat = 1", "optimizer.learning_rate"]),
            ("optimizer.learning_rate=fast", ['optimizer.learning_rate = "fast"']),
            ("seed.x=1", ["seed.x: "]),
            ("optimiser.type=SGD", ["optimiser"]),
        ]
    ),
    *(
        (f"validate CHECKPOINT DATA --protocol center224 {option}", ["--protocol center224"])
        for option in ("--crop 8", "--scale 8", "--ten-crops")
    ),
    ("validate resnet34 DATA --weights CHECKPOINT", ["arch='resnet32_cifar'", "arch='resnet34'"]),
    ("list resnet19", ["resnet18"]),
    ("show revnet38_cifar1.json", ["revnet38_cifar10"]),
    ("show no/such/file.json", ["no/such/file.json"]),
    ("show LOG", ["LOG: "]),
    ("show CHECKPOINT resnet18", ["resnet18: "]),
    ("settings optimizer.lerning_rate", ["optimizer.learning_rate"]),
    ("convert export CHECKPOINT CHECKPOINT", ["TARGET", "SOURCE"]),
    ("segment no-such-network DATA OUT --scales 1 0", ["scales = 1.0, 0.0"]),
    ("segment no-such-network DATA OUT --longest-side 100000", ["longest_side = 100000", "9459"]),
    ("data shard torchvision:CIFAR10 OUT", ["a data set by name"]),
    ("benchmark model resnet19 --out OUT", ["resnet18"]),
    ("benchmark model resnet18 --strategies magic --out OUT", ["magic", "std-BN checkpointed"]),
    ("benchmark model resnet18 --plot --rounds 0 --out OUT", ["plot"]),
    ("lean trian.py", ["trian.py"]),
    *((f"lean -m {module}", [module]) for module in ("zoo_no_such_module", "zoo_no.such.module", "json")),
]


@pytest.mark.parametrize(("command", "names"), USAGE, ids=[command for command, _ in USAGE])
def test_wrong_usage_exits_with_2(command: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(command.split())
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("usage: zoo " + ("" if command.startswith("trian") else command.split()[0]))
    assert [name for name in names if name not in printed.splitlines()[-1]] == []


@pytest.mark.parametrize(("command", "names"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_command_exits_with_2(
    command: str,
    names: list[str],
    finished: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # zoo lean changes it
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    places = {"CONFIG": finished.config, "DATA": finished.data, "LOG": finished.log_dir, "OUT": tmp_path / "out"}
    places["CHECKPOINT"] = finished.checkpoint
    words = [str(places.get(word, word)) for word in command.split()]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    message = printed[printed.index(f"zoo {words[0]}") :]
    assert [name for name in names if name.replace("LOG", str(finished.log_dir)) not in message] == []
    assert list(tmp_path.iterdir()) == []
