"""What theory says of a run: the constants of its problem, the paper's theorem, and the rates of the methods.

``theorem`` has the paper's formulas, ``rates`` those of other methods, ``constants`` what can be measured on a problem,
``staleness`` the delays at given speeds, and ``advice`` puts them together for ``dualdelay advise``.
"""

from .constants import Along as Along
from .constants import Constants as Constants
from .constants import Estimate as Estimate
from .constants import Moment as Moment
from .constants import constants as constants
from .rates import rates as rates
from .rates import times as times
from .staleness import Staleness as Staleness
from .staleness import delays as delays
from .staleness import tau_avg as tau_avg
from .staleness import tau_max as tau_max
from .staleness import tau_median as tau_median
from .theorem import bound as bound
from .theorem import horizon as horizon
from .theorem import largest_step as largest_step
from .theorem import step_size as step_size
