// The channel over TCP sockets of our own: one connection between any two ranks, both ends proven by the job's token. Headers and
// payloads go out from where the caller has them, and large payloads come in where the receiver wants them.
//
// Ranks are lost and come back as the Control says. A connection belongs to two incarnations, so nothing of an earlier one is
// ever heard. Who has come back waits at its gate, and the others knock.
#pragma once
#include <memory>
#include <string>

#include "dist/server/channel.h"
#include "dist/job/control.h"
#include "dist/job/handshake.h"

namespace tandem {

// gate: the one on this rank's card. Waits until this rank is connected to all that are there; throws Error that says to which
// it is not.
std::unique_ptr<Channel> socket_channel(std::shared_ptr<Control> control, std::unique_ptr<Gate> gate,
                                        const std::string& token);

}  // namespace tandem
