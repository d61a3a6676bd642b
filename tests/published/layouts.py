"""Picture data sets as their publishers lay them out, and what is found in each.

Made after the page in ``source``: a few of its classes and files, in braces as in a shell. In
``found`` are the numbers of training and evaluation pictures of each class; for a layout that is
refused, a part of the reason.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Layout(NamedTuple):
    """One way to lay out pictures."""

    source: str
    files: str
    found: str
    named: str = ""
    """A part of the notes."""
    content: Mapping[str, str] = {}
    """Of files that are read, by their names."""

    def paths(self) -> Iterator[str]:
        for pattern in self.files.split():
            parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
            yield from map("".join, itertools.product(*parts))


TWO = "n01440764 2+1, n01443537 2+1"
KAGGLE = "https://www.kaggle.com/"
IMAGENET = KAGGLE + "competitions/imagenet-object-localization-challenge/data"
CLS_LOC = (
    "ILSVRC/Data/CLS-LOC/train/{n01440764,n01443537}/{a_1,a_2}.JPEG "
    "ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_0000000{1,2}.JPEG "
    "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG "
    "ILSVRC/ImageSets/CLS-LOC/{train_cls,train_loc,val,test}.txt "
    "ILSVRC/Annotations/CLS-LOC/train/n01440764/a_1.xml "
    "ILSVRC/Annotations/CLS-LOC/val/ILSVRC2012_val_0000000{1,2}.xml "
)
XML = "<annotation><object><name>{}</name></object><object><name>{}</name></object></annotation>"
ANNOTATED = {
    "val.txt": "ILSVRC2012_val_00000001 1\nILSVRC2012_val_00000002 2\n",
    "ILSVRC2012_val_00000001.xml": XML.format("n01440764", "n01440764"),
    "ILSVRC2012_val_00000002.xml": XML.format("n01443537", "n01443537"),
}
SOLUTION = (
    "ImageId,PredictionString\n"
    "ILSVRC2012_val_00000001,n01440764 1 2 3 4 \n"
    "ILSVRC2012_val_00000002,n01443537 1 2 3 4 n01443537 5 6 7 8 \n"
)
UNSORTED = "no training pictures of two classes or more"

LAYOUTS = {
    "imagenet": Layout(
        IMAGENET,
        CLS_LOC + "LOC_{synset_mapping.txt,val_solution.csv,train_solution.csv}",
        TWO,
        "ILSVRC2012_test_00000001.JPEG",
        ANNOTATED | {"LOC_val_solution.csv": SOLUTION},
    ),
    "imagenet-annotations": Layout(IMAGENET, CLS_LOC, TWO, "ImageSets/CLS-LOC/test.txt", ANNOTATED),
    "imagenet-two-objects": Layout(
        IMAGENET,
        CLS_LOC,
        "1.JPEG, n01440764, n01443537, ",
        content=ANNOTATED | {"ILSVRC2012_val_00000001.xml": XML.format("n01440764", "n01443537")},
    ),
    "imagenet-devkit": Layout(
        "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php",
        "train/{n01440764,n01443537}/{1,2}.JPEG val/ILSVRC2012_val_00000001.JPEG "
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
        "ILSVRC2012_devkit_t12.tar.gz, or meta.mat",
    ),
    "imagenet-sorted": Layout(
        "https://github.com/pytorch/examples/blob/main/imagenet/extract_ILSVRC.sh",
        "train/{n01440764,n01443537}/{1,2}.JPEG val/{n01440764,n01443537}/3.JPEG",
        TWO,
    ),
    "imagenet-caffe": Layout(
        "https://github.com/BVLC/caffe/blob/master/data/ilsvrc12/get_ilsvrc_aux.sh",
        "train/{n01440764,n01443537}/{1,2}.JPEG val/ILSVRC2012_val_00000001.JPEG val.txt",
        "val/ILSVRC2012_val_00000001.JPEG",
        content={"val.txt": "ILSVRC2012_val_00000001.JPEG 65\n"},
    ),
    "tiny-imagenet": Layout(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "t/train/{n01440764,n01443537}/images/{1,2}.JPEG t/train/n01440764/n01440764_boxes.txt "
        "t/val/images/val_{0,1}.JPEG t/val/val_annotations.txt t/test/images/test_0.JPEG "
        "t/{wnids,words}.txt",
        TWO,
        "t/test/images/test_0.JPEG",
        {"val_annotations.txt": "val_0.JPEG\tn01440764\t0\nval_1.JPEG\tn01443537\t0\n"},
    ),
    "imagenette": Layout(
        "https://github.com/fastai/imagenette",
        "imagenette2/noisy_imagenette.csv imagenette2/train/{n01440764,n01443537}/{1,2}.JPEG "
        "imagenette2/val/{n01440764,n01443537}/3.JPEG",
        TWO,
        "noisy_imagenette.csv",
    ),
    "imagenet-v2": Layout(
        "https://github.com/modestyachts/ImageNetV2",
        "imagenetv2-matched-frequency-format-val/{0,1}/{a,b}.jpeg",
        "0 1+1, 1 1+1",
    ),
    "imagefolder": Layout(
        "https://docs.pytorch.org/vision/stable/generated/torchvision.datasets.ImageFolder.html",
        "dog/{xxx,xxy,[...]/xxz}.png cat/{123,nsdf3,[...]/asd932_}.png",
        "cat 2+1, dog 2+1",
    ),
    "hymenoptera": Layout(
        "https://docs.pytorch.org/tutorials/beginner/transfer_learning_tutorial.html",
        "hymenoptera_data/{train,val}/{ants,bees}/1.jpg",
        "ants 1+1, bees 1+1",
    ),
    "cats-and-dogs": Layout(
        "https://www.tensorflow.org/tutorials/images/transfer_learning",
        "c/train/{cats,dogs}/{1,2}.jpg c/validation/{cats,dogs}/3.jpg c/vectorize.py",
        "cats 2+1, dogs 2+1",
        "evaluated on the pictures in validation/",
    ),
    "flower-photos": Layout(
        "https://www.tensorflow.org/tutorials/load_data/images",
        "flower_photos/{daisy,roses}/{1,2}.jpg flower_photos/LICENSE.txt",
        "daisy 1+1, roses 1+1",
        "flower_photos/LICENSE.txt",
    ),
    "chest-xray": Layout(
        KAGGLE + "datasets/paultimothymooney/chest-xray-pneumonia",
        "chest_xray/{train,test,val}/{NORMAL,PNEUMONIA}/1.jpeg",
        "NORMAL 1+1, PNEUMONIA 1+1",
        "chest_xray/test/NORMAL/1.jpeg",
    ),
    "brain-tumor": Layout(
        KAGGLE + "datasets/masoudnickparvar/brain-tumor-mri-dataset",
        "{Training,Testing}/{glioma,notumor}/1.jpg",
        "glioma 1+1, notumor 1+1",
        "evaluated on the pictures in testing/",
    ),
    "roboflow": Layout(
        "https://docs.roboflow.com/datasets/dataset-versions/exporting-a-dataset",
        "{train,valid,test}/{cats,dogs}/1.jpg README.roboflow.txt",
        "cats 1+1, dogs 1+1",
        "test/cats/1.jpg",
    ),
    "mnist-png": Layout(
        "https://github.com/myleott/mnist_png",
        "mnist_png/{training,testing}/{0,1}/1.png",
        "0 1+1, 1 1+1",
        "evaluated on the pictures in testing/",
    ),
    "cifar-fastai": Layout(
        "https://docs.fast.ai/data.external.html",
        "cifar10/{train,test}/{airplane,cat}/1.png cifar10/labels.txt",
        "airplane 1+1, cat 1+1",
        "evaluated on the pictures in test/",
    ),
    "huggingface": Layout(
        "https://huggingface.co/docs/datasets/image_dataset",
        "folder/{train,test}/{dog,cat}/1.png folder/train/metadata.jsonl",
        "cat 1+1, dog 1+1",
        "metadata.jsonl",
    ),
    "places365": Layout(
        "http://places2.csail.mit.edu/download-private.html",
        "places365_standard/{train,val}/{airfield,alcove}/1.jpg places365_standard/{train,val}.txt",
        "airfield 1+1, alcove 1+1",
        "places365_standard/val.txt",
    ),
    "caltech-256": Layout(
        "https://data.caltech.edu/records/nyy15-4j048",
        "256_ObjectCategories/{001.ak47,002.american-flag}/{1,2}.jpg",
        "001.ak47 1+1, 002.american-flag 1+1",
    ),
    "birds": Layout(
        "https://www.vision.caltech.edu/datasets/cub_200_2011/",
        "CUB_200_2011/images/{001.Albatross,002.Auklet}/{1,2}.jpg "
        "CUB_200_2011/{train_test_split,image_class_labels}.txt",
        "001.Albatross 1+1, 002.Auklet 1+1",
        "CUB_200_2011/train_test_split.txt",
    ),
    "eurosat": Layout(
        "https://github.com/phelber/EuroSAT",
        "2750/{AnnualCrop,Forest}/{1,2}.jpg",
        "AnnualCrop 1+1, Forest 1+1",
    ),
    "food-101": Layout(
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        "food-101/images/{apple_pie,waffles}/{1,2}.jpg food-101/meta/{train,test}.{txt,json}",
        "apple_pie 1+1, waffles 1+1",
        "food-101/meta/test.json",
    ),
    "pets": Layout(
        "https://www.robots.ox.ac.uk/~vgg/data/pets/",
        "images/{Abyssinian,beagle}_1.jpg annotations/{list,trainval,test}.txt",
        UNSORTED,
    ),
    "dogs-vs-cats": Layout(
        KAGGLE + "c/dogs-vs-cats/data", "train/{cat,dog}.{0,1}.jpg test1/1.jpg", UNSORTED
    ),
    "cars": Layout(
        "https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        "cars_{train,test}/0000{1,2}.jpg devkit/cars_meta.mat",
        "has folders of classes in cars_test, cars_train",
    ),
    "coco": Layout(
        "https://cocodataset.org/#download",
        "{train2017,val2017}/0000{1,2}.jpg annotations/instances_val2017.json",
        "has folders of classes in train2017, val2017",
    ),
    "intel": Layout(
        KAGGLE + "datasets/puneet6060/intel-image-classification",
        "seg_train/seg_train/{forest,sea}/1.jpg seg_test/seg_test/{forest,sea}/1.jpg "
        "seg_pred/seg_pred/1.jpg",
        "has folders of classes in seg_test, seg_train",
    ),
    "inaturalist": Layout(
        "https://github.com/visipedia/inat_comp/tree/master/2021",
        "train_mini/0000{0,1}_Animalia/1.jpg val/0000{0,1}_Animalia/2.jpg",
        UNSORTED,
    ),
    "yolo": Layout(
        "https://docs.ultralytics.com/datasets/detect/",
        "train/images/{1,2}.jpg train/labels/{1,2}.txt valid/images/1.jpg",
        UNSORTED + ": there must be",
    ),
    "masks": Layout(
        KAGGLE + "c/carvana-image-masking-challenge/data",
        "images/{1,2}.jpg masks/{1,2}.png",
        "has its pictures in images, masks, as sets for detection or segmentation have",
    ),
    "imagefolder-metadata": Layout(
        "https://huggingface.co/docs/datasets/image_dataset#imagefolder",
        "train/metadata.csv train/{1,2}.jpg",
        "it has files of .csv, .jpg",
    ),
    "cifar": Layout(
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "cifar-10-batches-bin/{data_batch_1,test_batch}.bin cifar-10-batches-bin/batches.meta.txt",
        "it has files of .bin, .txt",
    ),
    "webdataset": Layout(
        "https://github.com/webdataset/webdataset",
        "imagenet-train-00000{0,1}/{0001,0002}.{jpg,cls}",
        "0001.cls",
    ),
}
