"""ImageNet: classification of pictures of any size, with the whole model on every worker. The
script is ``train.py``."""

from typing import Final

from training.imagenet.settings import PRESETS, SYNTHETIC, ImagenetConfig
from training.recipe import Recipe
from training.record.events import ACCURACY, Measure

#: Share of the pictures whose class is among the five most likely.
TOP5: Final = Measure(name="top5", label="top-5", form="percent")

RECIPE: Final = Recipe(
    name="imagenet",
    config=ImagenetConfig,
    presets=PRESETS,
    built_in_data=SYNTHETIC,
    built_in_preset="small",
    data_help="folder or s3:// address of pictures: <class>/ (a tenth is held out), train/<class>/ "
    "and val/<class>/, or what training.data.pictures has made of them (default: pictures "
    "made on the device)",
    data_kind="pictures",
    inputs="training.imagenet.inputs",
    loop="training.imagenet.train",
    preload=(
        "torch._dynamo",  # torch's optimizers and DDP import it
        "transformers.models.resnet.modeling_resnet",
        "transformers.models.efficientnet.modeling_efficientnet",
    ),
    measures=(ACCURACY, TOP5),
    usage=(
        "from transformers import pipeline",
        'print(pipeline("image-classification", "{model}")("PICTURE"))',
    ),
)
