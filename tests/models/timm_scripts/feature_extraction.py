"""Prints the shapes of features of an image, as timm's page on feature extraction takes them; argument: an image."""

import sys

import torch
from PIL import Image
from timm import create_model
from timm.data import create_transform, resolve_data_config

image = Image.open(sys.argv[1]).convert("RGB")

model = create_model("resnet18", pretrained=False, num_classes=10)
model.eval()
config = resolve_data_config({"input_size": (3, 64, 64)}, model=model)
transform = create_transform(**config)
batch = transform(image).unsqueeze(0)

with torch.no_grad():
    print("logits", tuple(model(batch).shape))
    unpooled = model.forward_features(batch)
    print("unpooled", tuple(unpooled.shape))
    print("pooled", tuple(model.forward_head(unpooled, pre_logits=True).shape), model.num_features)
    final, intermediates = model.forward_intermediates(batch, indices=3)
    print("intermediates", [tuple(each.shape) for each in intermediates], torch.equal(final, unpooled))
    print("classifier", tuple(model.get_classifier().weight.shape))

    model.reset_classifier(0, "")
    print("without pooling", tuple(model(batch).shape))
    model.reset_classifier(0)
    print("without classifier", tuple(model(batch).shape), model.num_classes)

    backbone = create_model("resnet18", features_only=True, out_indices=(2, 4), in_chans=1).eval()
    print("channels", backbone.feature_info.channels(), "strides", backbone.feature_info.reduction())
    print("maps", [tuple(each.shape) for each in backbone(batch[:, :1])])
