//! Requests and answers over `/dev/fuse`: a read takes one request, a write sends one answer.
//!
//! A request stays with the open file that it was read from, with its lock and its lists. Threads
//! that share one would wait for each other there, so every thread has an opening of its own that
//! is joined to the mount, with a request that the standard library does not know. That is what is
//! unsafe here: the kernel reads one number through the pointer that it is given. All are opened
//! when it is mounted, one for each thread that may wait for a request, because later the process
//! may not be allowed to open anything; more threads than that share them. Where the device cannot
//! be opened a second time, all do.

#![expect(unsafe_code, reason = "one ioctl, as the essay says")]

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use zerocopy::IntoBytes;

use crate::dispatch::{Answer, Dispatcher, MAX_BYTES};
use crate::output::Output;
use crate::request::Request;
use crate::wire::OutHeader;

/// Headers and fixed parts beside the most data, and then some.
const HEAD_BYTES: usize = 4096;

/// `FUSE_DEV_IOC_CLONE`.
const CLONE: Opcode = opcode::read::<u32>(229, 0);

/// Opens the device. It belongs to no mount yet.
pub(crate) fn open() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Another way to the mount of `device`, or the same where there is no other.
pub(crate) fn join(device: &Arc<OwnedFd>) -> Arc<OwnedFd> {
    let joined = open().and_then(|new| {
        let number = u32::try_from(device.as_raw_fd()).expect("descriptors are not negative");
        // SAFETY: the request takes a pointer to a `u32`, which `Setter` gives it, and keeps
        // nothing of it.
        unsafe { ioctl(&new, Setter::<CLONE, u32>::new(number)) }.map(|()| new)
    });
    joined.map_or_else(|_| device.clone(), Arc::new)
}

/// A thread's way to `/dev/fuse`.
pub(crate) struct DeviceChannel {
    device: Arc<OwnedFd>,
    /// The request that was taken last, in the first `len` bytes.
    request: Box<[u8]>,
    len: usize,
    answer: Box<[u8]>,
}

impl DeviceChannel {
    /// The way through `device`.
    pub(crate) fn new(device: Arc<OwnedFd>) -> Self {
        let bytes = HEAD_BYTES + usize::try_from(MAX_BYTES).expect("1 MiB");
        let buffer = || vec![0; bytes].into_boxed_slice();
        Self { device, request: buffer(), len: 0, answer: buffer() }
    }

    /// Waits for the next request and takes it; `false` when the filesystem is mounted no longer.
    pub(crate) fn receive(&mut self) -> io::Result<bool> {
        loop {
            match rustix::io::read(&self.device, &mut *self.request) {
                Ok(len) => {
                    self.len = len;
                    return Ok(true);
                }
                // The second one where it went while a request was taken.
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(false),
                // Whoever asked has given up meanwhile, or a signal came.
                Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Has the request answered that was taken, and sends the answer.
    pub(crate) fn answer(&mut self, dispatcher: &Dispatcher) -> io::Result<Answer> {
        let bytes = &self.request[..self.len];
        let mut out = Output::new(&mut self.answer);
        let (unique, answer) = match Request::decode(bytes) {
            Ok(request) => (request.header.unique, dispatcher.answer(&request, &mut out)),
            Err(_) => (refused(bytes)?, Answer::Failed(Errno::INVAL)),
        };
        let (error, body) = match answer {
            Answer::Sent => (0, out.bytes()),
            Answer::Failed(errno) => (-errno.raw_os_error(), &[][..]),
            Answer::Silence => return Ok(answer),
        };
        let len = u32::try_from(size_of::<OutHeader>() + body.len()).expect("little over 1 MiB");
        let header = OutHeader { len, error, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
        match rustix::io::writev(&self.device, &parts) {
            // Whoever asked has given up meanwhile, or the mount is gone, which the next read says.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => Ok(answer),
            Err(error) => Err(error.into()),
        }
    }
}

/// By which number what is no request is refused, so that nobody waits for its answer.
fn refused(bytes: &[u8]) -> io::Result<u64> {
    // It stands behind the length and the opcode.
    let unique = bytes.get(8..).and_then(|rest| rest.first_chunk());
    unique.map(|&unique| u64::from_ne_bytes(unique)).ok_or_else(|| {
        let what = format!("{} bytes from /dev/fuse are no request", bytes.len());
        io::Error::new(io::ErrorKind::InvalidData, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with a length that lies is refused, and not left without an answer.
    #[test]
    fn what_is_no_request_is_refused_by_its_number() {
        let header = [[99_u32, 1].as_bytes(), [7_u64].as_bytes()].concat();
        assert!(Request::decode(&header).is_err());
        assert_eq!(refused(&header).ok(), Some(7));
        assert!(refused(&header[..15]).is_err());
    }
}
