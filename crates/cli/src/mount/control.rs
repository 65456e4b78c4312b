//! Verbs on a volume while it is mounted: the process that serves the mount does them, and who
//! called the program sees what they print.
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
//! There is one implementation of each verb. Which can be done this way is said in
//! [`OnMount`](crate::args::OnMount): a closed set, and with no option that names files of the
//! host. Paths of the host mean nothing to the other process, which might also wait for itself
//! there. So the client says for each place where in the mounted tree it is, and the places that
//! the parsed words have are replaced by these, one by one.
//!
//! # The channel
//!
//! Two ioctls on any directory of the mount. They work in every name space, go to the right mount
//! by construction, and nothing of them is left after SIGKILL. FUSE copies for an ioctl what its
//! number says, both ways. Numbers are those of the machine.
//!
//! ```text
//! START  | version 4 | umask 4 | seconds 8 | nanoseconds 4 | words 4 | places 4 | bytes 4 | words and places, a NUL behind each |
//! NEXT   | what comes 4 | number of bytes, or the exit code 4 | bytes |
//! ```
//!
//! An open directory has one job at a time, and that is its name: nobody else can ask for it. The
//! kernel says when the directory is closed, however the client ended, and the job is dropped then:
//! what it prints goes nowhere, and it ends when it notices that. What is done in one piece is done
//! to its end. So neither numbers of jobs nor a third ioctl that cancels one are needed.
//!
//! NEXT waits in a thread of the mount for [`PATIENCE`] at the most, and there are no more than
//! [`MOST_JOBS`], so that no CPU has all its threads waiting. All others wait in line at START.
//!
//! # Who may
//!
//! Root, and the user who serves the mount. That user's verbs are refused what the kernel's btrfs
//! would refuse that user, as `mkdir` on the mount is ([`crate::rights`]); settings of the whole
//! volume are that user's. What is made belongs to the caller.

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

/// What START and NEXT mean, and what the verbs are. A program of another version is refused.
const VERSION: u32 = 1;

/// How long NEXT waits for something to come.
const PATIENCE: Duration = Duration::from_millis(500);

/// Jobs at a time: fewer than the calls of one CPU that can wait at a time (eight).
const MOST_JOBS: usize = 6;

/// The data of START: FUSE copies up to 16 KiB.
const START_BYTES: usize = 16_000;

/// The data of NEXT.
const NEXT_BYTES: usize = 8_000;

/// What START has in front.
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

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Start {
    umask: u32,
    at: Timestamp,
    /// The command line behind the name of the program.
    words: Vec<OsString>,
    /// Where in what is mounted its places are.
    places: Vec<OsString>,
}

impl Start {
    /// As START has it; `None` when it is too long.
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

    /// What `data` says.
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

/// What comes next of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Next {
    /// Nothing yet.
    Nothing,
    /// It wrote this to standard output.
    Out(Vec<u8>),
    /// It wrote this to standard error.
    Err(Vec<u8>),
    /// It ended with this code.
    Ended(u32),
}

/// Bytes of one NEXT.
const NEXT_MOST: usize = NEXT_BYTES - 8;

impl Next {
    /// As NEXT has it.
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

    /// What `data` says; `None` when that is nothing that is known.
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

    fn start() -> Start {
        let words = ["subvolume", "create", "", "/mnt/\u{e4}"].map(OsString::from).to_vec();
        let places = vec![OsString::from_vec(b"/\xff".to_vec())];
        Start { umask: 0o027, at: Timestamp { secs: -5, nanos: 7 }, words, places }
    }

    #[test]
    fn requests_go_there_and_back() {
        let data = start().encode().expect("it is short");
        assert_eq!(Start::decode(&data).ok(), Some(start()));
        let long = Start { words: vec!["x".repeat(START_BYTES).into()], ..start() };
        assert!(long.encode().is_none());
        for next in [Next::Nothing, Next::Out(vec![1; NEXT_MOST]), Next::Ended(4)] {
            let bytes = next.encode();
            assert!(bytes.len() <= NEXT_BYTES);
            assert_eq!(Next::decode(&bytes), Some(next));
        }
        assert_eq!(Next::decode(&Next::Err(vec![7; 100]).encode()[..50]), None);
        assert_eq!(Next::decode(&[9; 8]), None);
    }

    /// Every number that lies, and every byte of the head that is another one.
    #[test]
    fn requests_that_are_none() {
        let data = start().encode().expect("it is short");
        // Five texts with 24 bytes in all, and what ends them.
        let whole = size_of::<StartHeader>() + 24 + 5;
        assert!(Start::decode(&data[..whole]).is_ok());
        for len in 0..whole {
            let decoded = Start::decode(&data[..len]);
            assert!(decoded.is_err(), "{len} bytes: {decoded:?}");
        }
        for at in 0..size_of::<StartHeader>() {
            for byte in 0..=u8::MAX {
                let mut other = data;
                other[at] = byte;
                // Whatever it says, it is taken for what it is or refused.
                if let Ok(decoded) = Start::decode(&other) {
                    assert_eq!(decoded.words.len() + decoded.places.len(), 5);
                }
            }
        }
    }
}
