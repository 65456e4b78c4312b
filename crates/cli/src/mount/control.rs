//! Verbs on a mounted volume. The process that serves the mount runs the verb, and the client,
//! which is the program that the user called, shows what the verb prints.
//!
//! ```text
//! offshoot subvolume create /mnt/x                    the process that serves /mnt
//!   the path is in a mount of ours: client
//!   opens the directory
//!   START: its words, the paths in what is mounted ─> a job with a thread of its own (jobs):
//!   NEXT ─────────────────────────────────────────>   the words parsed once more, the same verb,
//!        <──────────────── what it printed ──────────    on the volume that is open (live)
//!   NEXT ... <───────────────── how it ended ────────
//!   closes the directory
//! ```
//!
//! Each verb has one implementation. [`OnMount`](crate::args::OnMount) lists the verbs that work
//! this way; none of them has an option that names files of the host. The serving process must not
//! look at paths of the host: they may mean something else there, and a path into its own mount
//! would make it wait for itself. So the client sends, for each place, the path in the mounted
//! tree, and the serving process replaces the places in the parsed words by these, one by one.
//!
//! # The channel
//!
//! Two ioctls on any directory of the mount. They work in every name space, always reach the right
//! mount, and leave nothing behind after SIGKILL. FUSE copies the data of an ioctl in both
//! directions, as many bytes as the ioctl's number says. Integers have the byte order of the
//! machine.
//!
//! ```text
//! START  | version 4 | umask 4 | seconds 8 | nanoseconds 4 | words 4 | places 4 | bytes 4 | words and places, a NUL behind each |
//! NEXT   | what comes 4 | number of bytes, or the exit code 4 | bytes |
//! ```
//!
//! An open directory has at most one job, and identifies it: no other process can ask for the job.
//! The kernel reports when the directory is closed, however the client ended, and then the job is
//! dropped. Its output is discarded, and it ends when it notices that. A change that is done in one
//! piece is finished first. So the channel needs no job numbers, and no third ioctl to cancel a
//! job.
//!
//! NEXT waits in a thread of the mount, for at most [`PATIENCE`]. There are at most [`MOST_JOBS`]
//! jobs, so that no CPU has all of its threads waiting. Further clients wait at START.
//!
//! # Who may
//!
//! Root, and the user who serves the mount. A verb of that user is refused whatever the kernel's
//! btrfs would refuse, as `mkdir` on the mount is ([`crate::rights`]). That user may change
//! settings of the whole volume. New files belong to the caller.

mod channel;
mod client;
mod in_force;
mod jobs;

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use offshoot_vfs::{Errno, Error, Result, Timestamp};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) use client::mounted;
pub(crate) use in_force::Served;
pub(super) use in_force::in_force;
pub(super) use jobs::Jobs;

/// The version of START, NEXT and the verbs. A client with another version is refused.
const VERSION: u32 = 1;

/// How long NEXT waits for output.
const PATIENCE: Duration = Duration::from_millis(500);

/// The most jobs at a time: fewer than the eight calls that can wait on one CPU at a time.
const MOST_JOBS: usize = 6;

/// The size of the data of START. FUSE copies up to 16 KiB.
const START_BYTES: usize = 16_000;

/// The size of the data of NEXT.
const NEXT_BYTES: usize = 8_000;

/// The header of START.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
struct StartHeader {
    secs: i64,
    version: u32,
    umask: u32,
    nanos: u32,
    words: u32,
    places: u32,
    bytes: u32,
}

/// The request to start a job.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StartRequest {
    umask: u32,
    at: Timestamp,
    /// The command line after the name of the program.
    words: Vec<OsString>,
    /// The places of the command line, as paths in the mounted tree.
    places: Vec<OsString>,
}

impl StartRequest {
    /// The data of START; `None` if it is too long.
    fn encode(&self) -> Option<[u8; START_BYTES]> {
        let mut bytes = Vec::new();
        for text in self.words.iter().chain(&self.places) {
            bytes.extend_from_slice(text.as_bytes());
            bytes.push(0);
        }
        let count = |len: usize| u32::try_from(len).ok();
        let header = StartHeader {
            secs: self.at.secs,
            version: VERSION,
            umask: self.umask,
            nanos: self.at.nanos,
            words: count(self.words.len())?,
            places: count(self.places.len())?,
            bytes: count(bytes.len())?,
        };
        let mut data = [0; START_BYTES];
        let (head, rest) = data.split_at_mut(size_of::<StartHeader>());
        head.copy_from_slice(header.as_bytes());
        rest.get_mut(..bytes.len())?.copy_from_slice(&bytes);
        Some(data)
    }

    /// Parses the data of START.
    fn decode(data: &[u8]) -> Result<Self> {
        let malformed = || Error::posix(Errno::INVAL, "a request to a mount that is none");
        let (header, rest) = StartHeader::read_from_prefix(data).map_err(|_| malformed())?;
        if header.version != VERSION {
            let what = format!("version {} of the requests to a mount", header.version);
            return Err(Error::posix(Errno::OPNOTSUPP, what));
        }
        let size = |number: u32| usize::try_from(number).map_err(|_| malformed());
        let (words, places) = (size(header.words)?, size(header.places)?);
        let rest = rest.get(..size(header.bytes)?).and_then(|rest| rest.strip_suffix(b"\0"));
        let texts = rest.ok_or_else(malformed)?.split(|&byte| byte == 0);
        let mut texts: Vec<_> = texts.map(|text| OsString::from_vec(text.to_vec())).collect();
        if words.checked_add(places) != Some(texts.len()) || header.nanos >= 1_000_000_000 {
            return Err(malformed());
        }
        let places = texts.split_off(words);
        let at = Timestamp { secs: header.secs, nanos: header.nanos };
        Ok(Self { umask: header.umask & 0o777, at, words: texts, places })
    }
}

/// The next event of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    /// Nothing happened yet.
    Nothing,
    /// The job wrote this to standard output.
    Out(Vec<u8>),
    /// The job wrote this to standard error.
    Err(Vec<u8>),
    /// The job ended with this code.
    Ended(u32),
}

/// The most output that one NEXT carries, in bytes.
const NEXT_MOST: usize = NEXT_BYTES - 8;

impl Next {
    /// The data of NEXT.
    fn encode(&self) -> Vec<u8> {
        let len = |bytes: &[u8]| u32::try_from(bytes.len()).expect("no more than NEXT_MOST");
        let (kind, number, bytes) = match self {
            Self::Nothing => (0, 0, &[][..]),
            Self::Out(bytes) => (1, len(bytes), &bytes[..]),
            Self::Err(bytes) => (2, len(bytes), &bytes[..]),
            Self::Ended(code) => (3, *code, &[][..]),
        };
        [[kind, number].as_bytes(), bytes].concat()
    }

    /// Parses the data of NEXT; `None` if it is malformed.
    fn decode(data: &[u8]) -> Option<Self> {
        let ([kind, number], rest) = <[u32; 2]>::read_from_prefix(data).ok()?;
        let bytes = || rest.get(..usize::try_from(number).ok()?).map(<[u8]>::to_vec);
        Some(match kind {
            0 => Self::Nothing,
            1 => Self::Out(bytes()?),
            2 => Self::Err(bytes()?),
            3 => Self::Ended(number),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start() -> StartRequest {
        let words = ["subvolume", "create", "", "/mnt/\u{e4}"].map(OsString::from).to_vec();
        let places = vec![OsString::from_vec(b"/\xff".to_vec())];
        StartRequest { umask: 0o027, at: Timestamp { secs: -5, nanos: 7 }, words, places }
    }

    #[test]
    fn requests_go_there_and_back() {
        let data = start().encode().expect("it is short");
        assert_eq!(StartRequest::decode(&data).ok(), Some(start()));
        let long = StartRequest { words: vec!["x".repeat(START_BYTES).into()], ..start() };
        assert!(long.encode().is_none());
        for next in [Next::Nothing, Next::Out(vec![1; NEXT_MOST]), Next::Ended(4)] {
            let bytes = next.encode();
            assert!(bytes.len() <= NEXT_BYTES);
            assert_eq!(Next::decode(&bytes), Some(next));
        }
        assert_eq!(Next::decode(&Next::Err(vec![7; 100]).encode()[..50]), None);
        assert_eq!(Next::decode(&[9; 8]), None);
    }

    /// Requests with each wrong number and each wrong byte in the header.
    #[test]
    fn requests_that_are_none() {
        let data = start().encode().expect("it is short");
        // Five texts with 24 bytes in total, and a NUL after each.
        let whole = size_of::<StartHeader>() + 24 + 5;
        assert!(StartRequest::decode(&data[..whole]).is_ok());
        for len in 0..whole {
            let decoded = StartRequest::decode(&data[..len]);
            assert!(decoded.is_err(), "{len} bytes: {decoded:?}");
        }
        for at in 0..size_of::<StartHeader>() {
            for byte in 0..=u8::MAX {
                let mut other = data;
                other[at] = byte;
                // A malformed request is refused, or decoded as what it says.
                if let Ok(decoded) = StartRequest::decode(&other) {
                    assert_eq!(decoded.words.len() + decoded.places.len(), 5);
                }
            }
        }
    }
}
