//! Numbers with types.
//!
//! XFS counts space in blocks of the filesystem, in three ways that must not mix: inside one
//! allocation group ([`AgBlock`]), over the volume ([`FsBlock`], with the number of the group in
//! the upper bits, so there are holes between groups), and inside one file ([`FileBlock`]). The
//! identity of structures and the log count in basic blocks of 512 bytes ([`BasicBlock`]).

use std::fmt;

macro_rules! numbers {
    ($($(#[doc = $doc:literal])+ $name:ident($inner:ty);)+) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub struct $name(pub $inner);
        )+
    };
}

macro_rules! shown {
    ($($name:ident)+) => {
        $(
            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }
        )+
    };
}

numbers! {
    /// The number of an allocation group.
    AgNumber(u32);
    /// A block of an allocation group, counted from its start.
    AgBlock(u32);
    /// A block of the volume: the group above [`XfsGeometry::ag_block_log`] bits of its block.
    ///
    /// [`XfsGeometry::ag_block_log`]: crate::XfsGeometry::ag_block_log
    FsBlock(u64);
    /// A block of a file or of another space with a tree of extents.
    FileBlock(u64);
    /// A place on the device in basic blocks of 512 bytes (`daddr`).
    BasicBlock(u64);
    /// An inode number: the group, the block in it, and the inode in the block.
    Ino(u64);
    /// An inode number inside its allocation group.
    AgIno(u32);
    /// A place in the log: the cycle above 32 bits of basic block.
    Lsn(u64);
}

shown! { AgNumber AgBlock FsBlock FileBlock BasicBlock Ino AgIno }

/// The cycle and the block, as in `3:1024`.
impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.cycle(), self.block())
    }
}

/// The bytes of a basic block.
pub const BASIC_BLOCK: u64 = 512;

impl AgBlock {
    /// The pointer that leads nowhere.
    pub const NULL: Self = Self(u32::MAX);
}

impl FsBlock {
    /// The pointer that leads nowhere.
    pub const NULL: Self = Self(u64::MAX);
}

impl Ino {
    /// The number of no inode.
    pub const NULL: Self = Self(u64::MAX);
}

impl AgIno {
    /// The number of no inode.
    pub const NULL: Self = Self(u32::MAX);
}

impl BasicBlock {
    /// The offset on the device, in bytes. No place of a valid volume overflows it.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0.saturating_mul(BASIC_BLOCK)
    }
}

impl Lsn {
    /// The LSN of structures that the log does not carry, such as remote attribute values.
    pub const NONE: Self = Self(u64::MAX);

    /// The place in the log with this cycle and basic block.
    #[must_use]
    pub fn new(cycle: u32, block: u32) -> Self {
        Self(u64::from(cycle) << 32 | u64::from(block))
    }

    /// How many times the log had been written around, from 1.
    #[must_use]
    pub fn cycle(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The basic block, from the start of the log.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the block")]
    pub fn block(self) -> u32 {
        self.0 as u32
    }
}
