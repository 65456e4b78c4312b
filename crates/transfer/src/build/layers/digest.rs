//! Digests of SHA-256, and what is read while its digest is computed.

use std::fmt;
use std::io::{self, Read};

use offshoot_vfs::escape::Escaped;
use sha2::{Digest, Sha256};

use crate::build::entry::SourceProblem;
use crate::build::unpack::ArchiveInput;

/// A digest of SHA-256.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sha256Digest([u8; 32]);

impl Sha256Digest {
    /// The digest `sha256:HEX`.
    pub(super) fn parse(text: &str) -> Result<Self, SourceProblem> {
        let refused = || {
            let text = Escaped(text.as_bytes());
            SourceProblem::Refused(format!("a digest that is none of sha256: {text}"))
        };
        let hex = text.strip_prefix("sha256:").ok_or_else(refused)?;
        let (pairs, []) = hex.as_bytes().as_chunks::<2>() else { return Err(refused()) };
        let digit = |byte: u8| char::from(byte).to_digit(16).filter(|_| !byte.is_ascii_uppercase());
        let byte = |&[high, low]: &[u8; 2]| {
            digit(high).zip(digit(low)).and_then(|(high, low)| u8::try_from(high << 4 | low).ok())
        };
        let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or_else(refused)
    }

    /// The digest that the name of a file in an archive is: `blobs/sha256/HEX` or `HEX.json`.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        let hex = name.strip_prefix("blobs/sha256/").or_else(|| name.strip_suffix(".json"))?;
        Self::parse(&format!("sha256:{hex}")).ok()
    }

    /// The name of its blob in a layout of OCI.
    pub(super) fn blob(&self) -> String {
        format!("blobs/sha256/{}", self.hex())
    }

    /// Its 64 digits.
    pub(super) fn hex(&self) -> String {
        use std::fmt::Write;
        self.0.iter().fold(String::with_capacity(64), |mut digits, byte| {
            // Writing to a string does not fail.
            let _ = write!(digits, "{byte:02x}");
            digits
        })
    }

    /// The digest of `bytes`.
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

/// What is read, and its digest.
pub(super) struct Hashed<R> {
    inner: R,
    hasher: Option<Sha256>,
}

impl<R: Read> Hashed<R> {
    pub(super) fn new(inner: R, hashes: bool) -> Self {
        Self { inner, hasher: hashes.then(Sha256::new) }
    }

    /// The digest of all that there is, also of what was not read yet.
    pub(super) fn digest(mut self) -> io::Result<Sha256Digest> {
        if self.hasher.is_some() {
            io::copy(&mut self, &mut io::sink())?;
        }
        let hasher = self.hasher.unwrap_or_default();
        Ok(Sha256Digest(hasher.finalize().into()))
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buf)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(buf.get(..count).unwrap_or_default());
        }
        Ok(count)
    }
}

pub(super) struct HashedInput<'a>(pub(super) Hashed<Box<dyn ArchiveInput + 'a>>);

impl Read for HashedInput<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl ArchiveInput for HashedInput<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if self.0.hasher.is_none() {
            return self.0.inner.skip(bytes);
        }
        let skipped = io::copy(&mut self.0.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}
