# Generated from the list in __init__.py.
from zoo.weights._cache import digests_of as digests_of
from zoo.weights._cache import fetch_weights as fetch_weights
from zoo.weights._cache import md5_of as md5_of
from zoo.weights._load import LoadReport as LoadReport
from zoo.weights._load import load_state_dict as load_state_dict
from zoo.weights._load_file import load_stored as load_stored
from zoo.weights._read import read_checkpoint as read_checkpoint
from zoo.weights._read import read_state_dict as read_state_dict
from zoo.weights._stored import StoredWeights as StoredWeights
from zoo.weights._stored import read_weights as read_weights
