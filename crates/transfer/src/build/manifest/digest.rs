//! Digests of contents that a manifest gives.
//!
//! The contents are read once: what goes into the volume is what the digests are made of, holes as
//! zeros.

use md5::Md5;
use offshoot_vfs::escape::Escaped;
use ripemd::Ripemd160;
use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Sha256, Sha384, Sha512, Sha512_256};

use super::super::entry::{Contents, SourceProblem};
use super::super::verity::{VerityHash, VerityTree};
use crate::{Result, TransferFailure, Watcher};

/// Zeros, for holes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// What makes the digest of a file.
trait ContentsDigest {
    fn update(&mut self, data: &[u8]);

    /// The digest of all data, as text.
    fn finish(self: Box<Self>) -> String;
}

/// A digest of a crate.
struct CrateDigest(Box<dyn DynDigest>);

impl ContentsDigest for CrateDigest {
    fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn finish(self: Box<Self>) -> String {
        hex(&self.0.finalize())
    }
}

/// The digest of fs-verity.
impl ContentsDigest for VerityTree {
    fn update(&mut self, data: &[u8]) {
        VerityTree::update(self, data);
    }

    fn finish(self: Box<Self>) -> String {
        hex(&VerityTree::finish(*self))
    }
}

/// The checksum of cksum(1), of POSIX: a CRC of the data and then of its length.
#[derive(Default)]
struct Cksum {
    crc: u32,
    len: u64,
}

impl Cksum {
    /// What each byte does to the sum.
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let (mut at, mut byte) = (0, 0_u32);
        while at < 256 {
            let mut bits = byte << 24;
            let mut step = 0;
            while step < 8 {
                bits = if bits >> 31 == 1 { bits << 1 ^ 0x04c1_1db7 } else { bits << 1 };
                step += 1;
            }
            table[at] = bits;
            (at, byte) = (at + 1, byte + 1);
        }
        table
    };

    fn add(&mut self, byte: u8) {
        let [first, ..] = self.crc.to_be_bytes();
        let bits = Self::TABLE.get(usize::from(first ^ byte)).copied().unwrap_or_default();
        self.crc = self.crc << 8 ^ bits;
    }
}

impl ContentsDigest for Cksum {
    fn update(&mut self, data: &[u8]) {
        for &byte in data {
            self.add(byte);
        }
        self.len = self.len.wrapping_add(data.len() as u64);
    }

    fn finish(mut self: Box<Self>) -> String {
        let mut len = self.len;
        while len > 0 {
            let [last, ..] = len.to_le_bytes();
            self.add(last);
            len >>= 8;
        }
        (!self.crc).to_string()
    }
}

/// A kind of digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DigestKind {
    Cksum,
    Md5,
    Ripemd160,
    Sha1,
    Sha256,
    Sha384,
    Sha512,
    Sha512Of256,
    Verity(VerityHash),
}

impl DigestKind {
    fn begin(self) -> Box<dyn ContentsDigest> {
        let hashed: Box<dyn DynDigest> = match self {
            Self::Cksum => return Box::<Cksum>::default(),
            Self::Verity(hash) => return Box::new(VerityTree::new(hash)),
            Self::Md5 => Box::<Md5>::default(),
            Self::Ripemd160 => Box::<Ripemd160>::default(),
            Self::Sha1 => Box::<Sha1>::default(),
            Self::Sha256 => Box::<Sha256>::default(),
            Self::Sha384 => Box::<Sha384>::default(),
            Self::Sha512 => Box::<Sha512>::default(),
            Self::Sha512Of256 => Box::<Sha512_256>::default(),
        };
        Box::new(CrateDigest(hashed))
    }

    /// How many hexadecimal digits it has; 0 for a decimal number.
    pub(super) fn digits(self) -> usize {
        match self {
            Self::Cksum => 0,
            Self::Md5 => 32,
            Self::Ripemd160 | Self::Sha1 => 40,
            Self::Sha256 | Self::Sha512Of256 | Self::Verity(VerityHash::Sha256) => 64,
            Self::Sha384 => 96,
            Self::Sha512 | Self::Verity(VerityHash::Sha512) => 128,
        }
    }
}

/// A digest that contents must have: as a manifest calls it, its kind and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpectedDigest {
    pub(super) name: &'static str,
    pub(super) kind: DigestKind,
    /// Digits in lower case.
    pub(super) text: String,
}

/// A digest while it is made.
struct RunningDigest {
    expected: ExpectedDigest,
    digest: Box<dyn ContentsDigest>,
}

/// Contents whose digests are compared at their end.
pub(super) struct Verified<'a> {
    inner: &'a mut dyn Contents,
    running: Vec<RunningDigest>,
    /// Where the data that comes next begins.
    at: u64,
    size: u64,
    path: &'a [u8],
    watcher: &'a dyn Watcher,
    /// A caller asked for something.
    is_touched: bool,
}

impl<'a> Verified<'a> {
    /// The contents of the file at `path`, `size` bytes long.
    pub(super) fn new(
        inner: &'a mut dyn Contents,
        expected: &[ExpectedDigest],
        size: u64,
        path: &'a [u8],
        watcher: &'a dyn Watcher,
    ) -> Self {
        let running = expected
            .iter()
            .map(|expected| RunningDigest {
                expected: expected.clone(),
                digest: expected.kind.begin(),
            })
            .collect();
        Self { inner, running, at: 0, size, path, watcher, is_touched: false }
    }

    /// Reads everything, unless the sink did something with the contents: it made a hard link, and
    /// the file has these digests all the same.
    pub(super) fn verify_untouched(&mut self) -> Result {
        if self.is_touched || self.running.is_empty() {
            return Ok(());
        }
        let mut buf = vec![0; ZEROS.len()];
        while self.read_piece(&mut buf)?.is_some() {}
        Ok(())
    }

    fn update(&mut self, data: &[u8]) {
        for running in &mut self.running {
            running.digest.update(data);
        }
    }

    /// Takes zeros up to `end`.
    fn take_hole(&mut self, end: u64) -> Result {
        if self.running.is_empty() {
            return Ok(());
        }
        while self.at < end {
            if self.watcher.is_interrupted() {
                return Err(TransferFailure::Interrupted);
            }
            let len =
                usize::try_from(end - self.at).map_or(ZEROS.len(), |len| len.min(ZEROS.len()));
            self.update(ZEROS.get(..len).unwrap_or_default());
            self.at += len as u64;
        }
        Ok(())
    }

    /// Compares all digests.
    fn finish(&mut self) -> Result {
        self.take_hole(self.size)?;
        for RunningDigest { expected, digest } in self.running.drain(..) {
            let text = digest.finish();
            if text != expected.text {
                let ExpectedDigest { name, text: wanted, .. } = expected;
                let what = format!(
                    "its contents have the {name} {text}, and the manifest says {}",
                    Escaped(wanted.as_bytes())
                );
                return Err(SourceProblem::Refused(what).at(self.path));
            }
        }
        Ok(())
    }
}

impl Contents for Verified<'_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        self.is_touched = true;
        let Some((offset, len)) = self.inner.read_piece(buf)? else {
            self.finish()?;
            return Ok(None);
        };
        self.take_hole(offset)?;
        self.update(buf.get(..len).unwrap_or_default());
        self.at = offset.saturating_add(len as u64);
        Ok(Some((offset, len)))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        self.is_touched = true;
        self.inner.data_bytes()
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(2 * bytes.len()), |text, byte| text + &format!("{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_the_programs() {
        for (kind, digest) in [
            (DigestKind::Cksum, "3287646509"),
            (DigestKind::Md5, "5d41402abc4b2a76b9719d911017c592"),
            (DigestKind::Ripemd160, "108f07b8382412612c048d07d13f814118445acd"),
            (DigestKind::Sha1, "aaf4c61ddcc5e8a2dabede0f3b482cd9aea9434d"),
            (
                DigestKind::Sha512Of256,
                "e30d87cfa2a75db545eac4d61baf970366a8357c7f72fa95b52d0accb698f13a",
            ),
        ] {
            let mut digest_of = kind.begin();
            digest_of.update(b"hel");
            digest_of.update(b"lo");
            assert_eq!(digest_of.finish(), digest, "{kind:?}");
        }
    }
}
