"""Wrong commands exit with 2, print one message that names the fault, and write nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unicodedata import normalize

import pytest
import torch

from tests.cli.conftest import SETTINGS, Cli, Run, write_segmenter
from tests.data.sample_images import make_folder
from zoo.cli import main
from zoo.weights import read_checkpoint

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
#: Other commands. Words in capitals are the files of `places`; OUT must not exist afterwards.
WRONG: list[tuple[str, list[str]]] = [
    ("train no-such-file.json DATA", ["no-such-file.json"]),
    ("train resnet19 DATA --log-dir OUT", ["resnet19", "resnet18"]),
    ("train deeplab_resnet18 DATA --log-dir OUT", ["deeplab_resnet18", "layout"]),
    ("train torchvision:resnet19 DATA --log-dir OUT", ["torchvision", "'resnet19'"]),
    ('train torchvision:resnet18 DATA --log-dir OUT --set network.options={"blocks":3}', ["resnet18", "blocks"]),
    ("train torchvision:vit_b_16 DATA --log-dir OUT --set input.crop_train=48", ["input.crop_train = 48", "vit_b_16"]),
    ("train revbifpn_s3_imagenet DATA --log-dir OUT --epochs 1", ["optimizer: ", "revbifpn_s3"]),
    ("train resnet32_cifar DATA --log-dir OUT", ["crop of 32 px", "12 x 12 px"]),
    ("train CONFIG DATA --log-dir OUT --replicas 4 --batch-size 6", ["optimizer.replicas", "6: "]),
    ("train resnet32_cifar DIFFERENT --log-dir OUT", ["3 only in train/: ant, bee, cat", "1 only in val/: images"]),
    ("train resnet32_cifar UNICODE --log-dir OUT", ["Unicode composition"]),
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
    ("validate CHECKPOINT DATA -c 13 -s -1", ["crop of 13 px", "12 x 12 px"]),
    ("validate CHECKPOINT DATA --confusion OUT.xyz", ["OUT.xyz", "'.xyz'"]),
    ("validate CHECKPOINT DATA --confusion OUT.png OUT.png", ["OUT.png", "two options"]),
    ("validate CHECKPOINT DATA --confusion OUT.png --set imagenet-a", ["--set imagenet-a", "--confusion"]),
    ("validate resnet34 DATA --weights CHECKPOINT", ["arch='resnet32_cifar'", "arch='resnet34'"]),
    ("validate THREE DATA --weights CHECKPOINT", ["classifier", "CHECKPOINT"]),
    ("validate resnet18 DATA", ["resnet18", "published weights"]),
    ("validate CONFIG DATA", ["tiny", "published weights"]),
    ("validate BARE DATA", ["BARE", "network"]),
    ("validate resnet18 DATA --weights TORCHVISION", ["torchvision ResNet"]),
    *(
        (f"validate SCENES DATA --weights SEGMENTER {options}", names)
        for options, names in [
            ("--crop 8", ["leave out --crop"]),
            ("--scale -1 --ten-crops", ["leave out --scale, --ten-crops"]),
            ("--batch-size 2", ["leave out --batch-size"]),
            ("--predictions OUT", ["leave out --predictions"]),
            ("--protocol center224", ["'center224'", "whole, whole-flip"]),
        ]
    ),
    ("validate SCENES DATA --weights BODY", ["body", "head and cls"]),
    ("predict CHECKPOINT OUT.png", ["1 of 1 images"]),
    ("list resnet19", ["resnet18"]),
    ("list mobilenet", ["torchvision:NAME", "timm:NAME"]),
    ("show revnet38_cifar1.json", ["revnet38_cifar10"]),
    ("show no/such/file.json", ["no/such/file.json"]),
    ("show LOG", ["LOG: "]),
    ("show CHECKPOINT resnet18", ["resnet18: "]),
    ("settings optimizer.lerning_rate", ["optimizer.learning_rate"]),
    ("convert export CHECKPOINT CHECKPOINT", ["TARGET", "SOURCE"]),
    ("convert export BARE OUT", ["BARE", "--arch"]),
    ("convert from-torchvision BARE OUT --arch resnet18 --input-3x3", ["--input-3x3"]),
    ("convert to-torchvision TORCHVISION OUT --arch resnet18", ["missing"]),
    ("segment no-such-network DATA OUT --scales 1 0", ["scales = 1.0, 0.0"]),
    ("segment no-such-network DATA OUT --longest-side 100000", ["longest_side = 100000", "9459"]),
    ("data shard torchvision:CIFAR10 OUT", ["a data set by name"]),
    ("benchmark model resnet19 --out OUT", ["resnet18"]),
    ("benchmark model resnet18 --strategies magic --out OUT", ["magic", "std-BN checkpointed"]),
    ("benchmark model resnet18 --plot --rounds 0 --out OUT", ["plot"]),
    ("reproduce imagenet --out OUT", ["--data"]),
    ("reproduce imagenet --data none --out OUT", ["none", "val/"]),
    ("reproduce revnet --only table9 --out OUT", ["--only", "table9", "Table 1"]),
    ("lean trian.py", ["trian.py"]),
    *((f"lean -m {module}", [module]) for module in ("zoo_no_such_module", "zoo_no.such.module", "json")),
]


@pytest.fixture(scope="module")
def places(finished: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that commands refuse together with others, by their names in `WRONG`."""
    root = tmp_path_factory.mktemp("places")
    (root / "three.json").write_text(json.dumps({**SETTINGS, "network": {**SETTINGS["network"], "classes": 3}}))
    weights = read_checkpoint(finished.checkpoint)["state_dict"]
    torch.save(weights, root / "bare.pth")
    torch.save({"layer1.0.conv1.weight": torch.ones(64, 64, 3, 3)}, root / "torchvision.pth")
    (root / "scenes").mkdir()
    scenes, segmenter = write_segmenter(root / "scenes")
    body = read_checkpoint(segmenter)["state_dict"]["body"]
    torch.save({**body, "classifier.fc.weight": torch.ones(2, 512), "classifier.fc.bias": torch.ones(2)}, root / "body")
    for name, classes in (("train", {"ant": 2, "bee": 2, "cat": 2}), ("val", {"images": 2})):
        make_folder(root / "different" / name, classes)
    for name, form in (("train", "NFD"), ("val", "NFC")):
        make_folder(root / "unicode" / name, {normalize(form, "café"): 2, "tea": 2})
    return {
        **{"CONFIG": finished.config, "DATA": finished.data, "LOG": finished.log_dir},
        **{"CHECKPOINT": finished.checkpoint, "THREE": root / "three.json", "BARE": root / "bare.pth"},
        **{"TORCHVISION": root / "torchvision.pth", "SCENES": scenes, "SEGMENTER": segmenter, "BODY": root / "body"},
        **{"DIFFERENT": root / "different", "UNICODE": root / "unicode"},
    }


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
    command: str, names: list[str], places: dict[str, Path], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # zoo lean changes it
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    places = {**places, "OUT": tmp_path / "out"}

    def filled(text: str) -> str:
        return re.sub(rf"^({'|'.join(places)})\b", lambda found: str(places[found[0]]), text)

    printed = cli(*map(filled, command.split()), code=2)
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert "assuming" not in printed.err
    message = printed.err[printed.err.index(f"zoo {command.split()[0]}") :]
    assert [name for name in names if filled(name) not in message] == []
    assert list(tmp_path.iterdir()) == []
