from fastps.control.sockets import *  # temporary
from fastps.control.sockets import _refuse_self
