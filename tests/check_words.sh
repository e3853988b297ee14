#!/bin/sh
# The words of the design stay: identifiers and phrases that were replaced by the field's own do not come back, in code, comments,
# options' texts or documents. Prints file:line and the word. A line ends with its replacement after the colon.
set -u

words() {  # an extended regular expression, a tab, what to write instead
  cat <<'END'
\bParameterSpace\b|\bSpaceMemory\b|[Pp]arameter space\b	FlatParameters, the flat parameters
\bSegment\b(?!s)|\bStatisticSegment\b	ParameterRange, BufferRange
\.extent\(|\bextents_?\b|\bextent\b	size, sizes
\.elements\(\)|\belements_\b|[xyw]_elements\b	numel
\bkeep_axes\b	keepdim
\bconcat\(|\bConcatNode\b	cat
\b(inverse|xavier|kaiming)_deviation\b|(?<!standard )\bdeviation\b	std, standard deviation
\.window = 	kernel_size
\bSink\b|\bsinks\[	GradientSlot, slots
\bcopy_box\b|\bBoxCopy\b|\bBox\b(?![–-])	StridedView, copy_view
\bwinners?\b	argmax, argmax indices
\b[Mm]odule::statistic\b|\bstatistic_segments\b|\bStatistic\b	buffer, ModuleBuffer
\bjudge(_step)?\(	check_gradients, check_step
\bTally\b|\bScore\b|\bso_far\b	EpochSums, MetricSums, running_sums
\bExchangeFiles\b|\bObserver\b|\bObserveOptions\b|\bcontradictions\b	ImportExportFiles, ProfilerOptions, option checks
\btrain(s|ed|ing)? apart\b|\b(steps|apply|update|draw)_together\b	asynchronous, synchronous
\b[Tt]ickets?\b	work lease, lease
\bLetters\b|\bNote n\b|\bconst Note&|\bPost&|\bEarly::	MessageHeader, UnexpectedMessages
\bDesk\b|\bdesks_\b	ControlBlock
\bSeats?\b|\bseats?_?\b|\bCard\b|\ba card\b	MemberSlot, AddressRecord
\bGate\b|\bDoor\b|\bknock\(|\bStranger\b|\bcome_back\b|\bWelcome\b	HandshakeListener, connect_with_token, UnauthenticatedPeer, rejoin
\bRollCall\b|\b[Rr]oll call\b|\bAdoptions?\b|\bStanding\b|\bLanding\b	SurvivorAgreement, FailOver, WaitForEdge, ReceiveBuffer
\bServed\b|\bclass (Owner|Member)\b|\b(Owner|Member)::	ShardService, ShardServer, ServerNode
\bquiet\(\)|\bsettle\(|\bPace\b|\bmanieth\b	drain, flush, StragglerEmulation, n-th
END
}

# The files on standard input, one a line, held against the list; tests/reference and results that were measured are left out.
offences() {
  tab=$(printf '\t')
  words | while IFS="$tab" read -r pattern instead; do
    xargs -d '\n' grep -nHoP -e "$pattern" <"$1" /dev/null | sed "s|\$| → $instead|"
  done
}

list=$(mktemp)
tree=$(mktemp -d)
trap 'rm -rf "$list" "$tree"' EXIT

# First the check is checked: a fault, and a text without one.
printf 'ParameterSpace space(model);\n// the inverse deviation\n' >"$tree/bad.cpp"
printf 'FlatParameters flat(model);\n// the standard deviation (Box–Muller)\n' >"$tree/good.cpp"
ls "$tree"/*.cpp >"$list"
[ "$(offences "$list" | grep -c bad.cpp)" -eq 2 ] && ! offences "$list" | grep -q good.cpp ||
  { echo "check_words.sh does not find the words it is tried on"; exit 1; }

git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.md' '*.sh' Makefile 2>/dev/null |
  grep -vE '^tests/(reference/|check_words\.sh|bench/(peers|results)/)|^examples/(recipes|experiments)/' >"$list"
[ -s "$list" ] || { echo 'not a git checkout: which files are ours is unknown'; exit 77; }
found=$(offences "$list")
[ -z "$found" ] || { echo "$found"; exit 1; }
