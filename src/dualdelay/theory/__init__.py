"""What theory says of a run: the constants of its problem, the paper's theorem, and the rates of the methods."""

from .along import Along as Along
from .along import Moment as Moment
from .constants import Constants as Constants
from .constants import constants as constants
from .rates import rates as rates
from .rates import times as times
from .staleness import Staleness as Staleness
from .staleness import delays as delays
from .staleness import tau_avg as tau_avg
from .staleness import tau_max as tau_max
from .survey import Estimate as Estimate
from .theorem import bound as bound
from .theorem import horizon as horizon
from .theorem import largest_step as largest_step
from .theorem import step_size as step_size
