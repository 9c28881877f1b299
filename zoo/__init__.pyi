# Generated from the list in __init__.py.
from zoo import convert as convert
from zoo import layers as layers
from zoo import remat as remat
from zoo import weights as weights
from zoo.errors import CheckpointError as CheckpointError
from zoo.errors import ConfigError as ConfigError
from zoo.errors import ConversionError as ConversionError
from zoo.errors import DataError as DataError
from zoo.errors import NonFiniteLossError as NonFiniteLossError
from zoo.errors import TrainingInterrupted as TrainingInterrupted
from zoo.errors import VerificationError as VerificationError
from zoo.errors import WeightsError as WeightsError
from zoo.errors import ZooError as ZooError
from zoo.memory.check import check as check
from zoo.memory.release import release_gradients as release_gradients
from zoo.memory.report import memory_report as memory_report
from zoo.registry.get import create_model as create_model
from zoo.registry.get import get as get
from zoo.registry.get import load_weights as load_weights
from zoo.registry.load_network import load_network as load_network
from zoo.registry.names import is_model as is_model
from zoo.registry.names import list_models as list_models
from zoo.registry.names import list_pretrained as list_pretrained
from zoo.registry.transforms import transforms as transforms
from zoo.remat._lean import lean as lean
from zoo.run.predicting import predict as predict
from zoo.run.scoring import score as score
from zoo.run.segmenting import segment as segment
from zoo.run.training import train as train

__version__: str
