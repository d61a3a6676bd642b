"""DDP: image classification with the whole model on every worker. The script is ``train.py``."""

from typing import Final

from training.data import DIGITS, catalog
from training.ddp.settings import PRESETS, SMALL, DdpConfig
from training.recipe import Recipe
from training.record.events import ACCURACY

RECIPE: Final = Recipe(
    name="ddp",
    config=DdpConfig,
    presets=PRESETS,
    built_in_data=DIGITS,
    built_in_preset="digits",
    data_help=f"{', '.join(catalog.names(catalog.IMAGES))}, or folder, http(s):// or s3:// address "
    "of the data (default: built-in digits)",
    data_kind=catalog.IMAGES,
    inputs="training.ddp.inputs",
    loop="training.ddp.train",
    # torch's optimizers and DDP import it, all by themselves.
    preload=("torch._dynamo",),
    measures=(ACCURACY,),
    own_models=(SMALL,),
    # Not transformers' pipeline, for which all pictures have three colors.
    usage=(
        "import PIL.Image, transformers as hf",
        'pixels = hf.AutoImageProcessor.from_pretrained("{model}")'
        '(PIL.Image.open("PICTURE").convert("L"), return_tensors="pt")',
        'print(hf.AutoModelForImageClassification.from_pretrained("{model}")'
        "(**pixels).logits.argmax())",
    ),
)
