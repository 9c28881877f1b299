# Generated from the list in __init__.py.
from zoo.weights.cache import digests_of as digests_of
from zoo.weights.cache import fetch_weights as fetch_weights
from zoo.weights.cache import md5_of as md5_of
from zoo.weights.load import LoadReport as LoadReport
from zoo.weights.load import load_state_dict as load_state_dict
from zoo.weights.load_file import load_stored as load_stored
from zoo.weights.read import read_checkpoint as read_checkpoint
from zoo.weights.read import read_state_dict as read_state_dict
from zoo.weights.stored import StoredWeights as StoredWeights
from zoo.weights.stored import read_weights as read_weights
