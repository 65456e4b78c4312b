//! The digest of fs-verity.
//!
//! ```text
//! data      | 4096 | 4096 | 4096 | 100, and zeros |
//!              │      │      │      │                 a hash each
//! level 0   | hash   hash   hash   hash, and zeros |
//!              │                                      and so on, until a level has one hash: the root
//! digest    = hash of a descriptor of 256 bytes: version 1, algorithm, size of blocks, size of the
//!             file, the root
//! ```
//!
//! Blocks have 4096 bytes, and there is no salt: what `fsverity digest` and composefs use. A file
//! without data has a root of zeros. It is all described in the kernel's
//! `Documentation/filesystems/fsverity.rst`.

use sha2::digest::DynDigest;
use sha2::{Sha256, Sha512};

/// The size of a block of data, and of the tree.
const BLOCK_BYTES: usize = 4096;

/// The size of a descriptor.
const DESCRIPTOR_BYTES: usize = 256;

/// What makes the hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum VerityHash {
    Sha256,
    Sha512,
}

impl VerityHash {
    fn begin(self) -> Box<dyn DynDigest> {
        match self {
            Self::Sha256 => Box::<Sha256>::default(),
            Self::Sha512 => Box::<Sha512>::default(),
        }
    }

    /// Its number in a descriptor.
    fn number(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha512 => 2,
        }
    }
}

/// A level of the tree while it grows.
#[derive(Default)]
struct VerityLevel {
    /// The hashes of the block that is not full yet.
    block: Vec<u8>,
    /// How many hashes it has in all.
    hashes: u64,
}

/// The tree over a file whose data comes piece by piece.
pub(super) struct VerityTree {
    hash: VerityHash,
    /// The block of data that is not full yet.
    data: Vec<u8>,
    size: u64,
    levels: Vec<VerityLevel>,
}

impl VerityTree {
    pub(super) fn new(hash: VerityHash) -> Self {
        Self { hash, data: Vec::with_capacity(BLOCK_BYTES), size: 0, levels: Vec::new() }
    }

    /// Takes the next data.
    pub(super) fn update(&mut self, mut data: &[u8]) {
        self.size = self.size.wrapping_add(data.len() as u64);
        while !data.is_empty() {
            let len = data.len().min(BLOCK_BYTES - self.data.len());
            let (taken, rest) = data.split_at(len);
            self.data.extend_from_slice(taken);
            data = rest;
            if self.data.len() == BLOCK_BYTES {
                let hash = self.hash_of(&self.data);
                self.data.clear();
                self.push(0, hash);
            }
        }
    }

    fn hash_of(&self, block: &[u8]) -> Box<[u8]> {
        let mut hasher = self.hash.begin();
        hasher.update(block);
        hasher.finalize()
    }

    /// Adds a hash to a level, and the hashes of blocks that are full to those above it.
    fn push(&mut self, mut at: usize, mut hash: Box<[u8]>) {
        loop {
            if self.levels.len() <= at {
                self.levels.resize_with(at + 1, VerityLevel::default);
            }
            let Some(level) = self.levels.get_mut(at) else { return };
            // A full block stays until another hash comes: it may be all that the level has.
            let full = (level.block.len() == BLOCK_BYTES).then(|| std::mem::take(&mut level.block));
            level.block.extend_from_slice(&hash);
            level.hashes += 1;
            let Some(full) = full else { return };
            hash = self.hash_of(&full);
            at += 1;
        }
    }

    /// The digest of the file.
    pub(super) fn finish(mut self) -> Box<[u8]> {
        if !self.data.is_empty() {
            let mut block = std::mem::take(&mut self.data);
            block.resize(BLOCK_BYTES, 0);
            let hash = self.hash_of(&block);
            self.push(0, hash);
        }
        let root = self.root();
        let mut descriptor = [0; DESCRIPTOR_BYTES];
        let fields = [&[1, self.hash.number(), 12, 0, 0, 0, 0, 0][..], &self.size.to_le_bytes()];
        let bytes = fields.concat().into_iter().chain(root);
        for (place, byte) in descriptor.iter_mut().zip(bytes) {
            *place = byte;
        }
        self.hash_of(&descriptor)
    }

    /// The root of the tree; nothing for a file without data.
    fn root(&mut self) -> Vec<u8> {
        let mut at = 0;
        while let Some(level) = self.levels.get_mut(at) {
            let mut block = std::mem::take(&mut level.block);
            if level.hashes == 1 {
                return block;
            }
            block.resize(BLOCK_BYTES, 0);
            let hash = self.hash_of(&block);
            at += 1;
            self.push(at, hash);
        }
        Vec::new()
    }
}
