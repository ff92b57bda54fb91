"""What theory says of a run: the constants of its problem, the paper's theorem, and the rates of the methods.

``theorem`` has the paper's formulas, ``rates`` those of other methods, ``constants`` what can be measured on a problem,
``staleness`` the delays at given speeds, and ``advice`` puts them together for ``dualdelay advise``. What a run on real
workers will take is in ``cost``: from what a method takes for each weight (``footprint``) and from what a machine can do
(``machine``); ``sizing`` puts these together for ``dualdelay size``.
"""

from .constants import Along as Along
from .constants import Constants as Constants
from .constants import Estimate as Estimate
from .constants import Moment as Moment
from .constants import constants as constants
from .cost import Cost as Cost
from .cost import Plan as Plan
from .cost import Process as Process
from .footprint import Footprint as Footprint
from .machine import Machine as Machine
from .machine import Message as Message
from .rates import rates as rates
from .rates import times as times
from .sizing import Change as Change
from .sizing import Size as Size
from .sizing import size as size
from .staleness import Staleness as Staleness
from .staleness import delays as delays
from .staleness import tau_avg as tau_avg
from .staleness import tau_max as tau_max
from .staleness import tau_median as tau_median
from .theorem import bound as bound
from .theorem import horizon as horizon
from .theorem import largest_step as largest_step
from .theorem import step_size as step_size
