"""The table of the data sets that come as files: addresses and checksums, nothing else.

The checksums of archives, CIFAR batches and gzipped idx files are those torchvision publishes. A further data
set is a further entry.
"""

from __future__ import annotations

from hesscond.data.cifar import CifarSource
from hesscond.data.files import Download
from hesscond.data.idx import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS, IdxMd5, IdxSource
from hesscond.data.source import Source

_MNIST = {
    TRAIN_IMAGES: IdxMd5("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    TRAIN_LABELS: IdxMd5("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    TEST_IMAGES: IdxMd5("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    TEST_LABELS: IdxMd5("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
_FASHION = {
    TRAIN_IMAGES: IdxMd5("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    TRAIN_LABELS: IdxMd5("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    TEST_IMAGES: IdxMd5("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    TEST_LABELS: IdxMd5("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
}

_ALL = (
    CifarSource(
        name="cifar10",
        classes=10,
        folder="cifar-10-batches-py",
        archive=Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-python.tar.gz",
        ),
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        label_key=b"labels",
    ),
    CifarSource(
        name="cifar100",
        classes=100,
        folder="cifar-100-python",
        archive=Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python.tar.gz",
        ),
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        label_key=b"fine_labels",
    ),
    IdxSource(
        name="fashion-mnist",
        folder="FashionMNIST/raw",
        # The only address of the publisher that serves these files, without https; the md5 check covers that.
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5=_FASHION,
        namesakes=frozenset({_MNIST[TRAIN_LABELS].gz}),
    ),
    IdxSource(
        name="mnist",
        folder="MNIST/raw",
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5=_MNIST,
        namesakes=frozenset({_FASHION[TRAIN_LABELS].gz}),
    ),
)

SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
