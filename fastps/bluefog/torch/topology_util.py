# SPDX-License-Identifier: Apache-2.0
"""Graphs by BlueFog's names, where bluefog.torch has them. Only hands names on."""

from fastps.bluefog.common import topology_util

ExponentialGraph = topology_util.ExponentialGraph
ExponentialTwoGraph = topology_util.ExponentialTwoGraph
FullyConnectedGraph = topology_util.FullyConnectedGraph
GetDynamicOnePeerSendRecvRanks = topology_util.GetDynamicOnePeerSendRecvRanks
GetExp2DynamicSendRecvMachineRanks = topology_util.GetExp2DynamicSendRecvMachineRanks
GetInnerOuterExpo2DynamicSendRecvRanks = topology_util.GetInnerOuterExpo2DynamicSendRecvRanks
GetInnerOuterRingDynamicSendRecvRanks = topology_util.GetInnerOuterRingDynamicSendRecvRanks
GetRecvWeights = topology_util.GetRecvWeights
GetSendWeights = topology_util.GetSendWeights
InferDestinationFromSourceRanks = topology_util.InferDestinationFromSourceRanks
InferSourceFromDestinationRanks = topology_util.InferSourceFromDestinationRanks
IsRegularGraph = topology_util.IsRegularGraph
IsTopologyEquivalent = topology_util.IsTopologyEquivalent
MeshGrid2DGraph = topology_util.MeshGrid2DGraph
RingGraph = topology_util.RingGraph
StarGraph = topology_util.StarGraph
SymmetricExponentialGraph = topology_util.SymmetricExponentialGraph
